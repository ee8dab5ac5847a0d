"""Draws what became of a run: `adaptive_report.png`.

python -m torchtune_adaptive.run_picture OUTPUT_DIR
"""

from torchtune_adaptive.record.charts.run import main

if __name__ == "__main__":
    main()
