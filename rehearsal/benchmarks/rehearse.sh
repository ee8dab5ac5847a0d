# Rehearses the cases of trl, transformers or torchtitan in a new folder, which gets the project's sources and generated data:
#
#     sh benchmarks/rehearse.sh PROJECT FOLDER > benchmarks/results/PROJECT.json
#
# The environment needs torch 2.15.0, transformers 5.23.0, accelerate, datasets and peft. trl also needs bitsandbytes, requests,
# scikit-learn, joblib and math-verify; transformers needs evaluate, scikit-learn, nltk, rouge_score, sacrebleu and seqeval;
# torchtitan needs torchtitan 0.3.0, and torchao must not be installed.
set -eu
cases=$(cd "$(dirname "$0")" && pwd) project=$1
fetch() { # a repository, a commit and its files
    repository=$1 commit=$2
    shift 2
    git init --quiet "sources/$repository"
    git -C "sources/$repository" fetch --quiet --depth 1 "https://github.com/$repository" "$commit"
    git -C "sources/$repository" archive FETCH_HEAD "$@" | tar -x
}
mkdir "$2"
cd "$2"
case $project in
trl)
    fetch huggingface/trl f2cd57710ae345ea6428ae95363267fcf38a3dc8 trl examples VERSION
    ;;
transformers)
    fetch huggingface/transformers cc041637bc2b3639bba0b8f85672c1653cdb6248 examples/pytorch
    fetch huggingface/evaluate a7dd338386a4fae9a1767e05eb9ef9479513d9e8 metrics
    mv examples/pytorch metrics/* .
    mkdir -p nltk_data/tokenizers/punkt # needed only after the training
    ;;
torchtitan)
    fetch pytorch/torchtitan b5bcd76c66d0acb1a08b176d9639425bc55e0b2a tests/assets/tokenizer tests/assets/sft_test
    ;;
esac
export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE=cache OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false NLTK_DATA=nltk_data PYTHONPATH=".:${PYTHONPATH:-}"
python "$cases/hub.py" . >&2
rehearse --cases "$cases/$project.toml" --format json | sed "s|$PWD/||g"
