// Extensions: libraries that a program opens while it runs. They may call functions of CUDA that this library does not have, because
// torch does not call them. Stubs for these are compiled before the extension is opened, into a library beside this one.
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_MISSING = 1024 };
static const char *const libraries[] = {"cuda", "cudart", "nvidia-ml", "cublas", "cublasLt", "cudnn", "cufft", "cusolver", "cusparse", "nccl"};
static const char *const prefixes[] = {"__cuda", "cuda", "cu", "cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nccl", "nvml"};

static int starts_in_uppercase(const char *name) { return *name >= 'A' && *name <= 'Z'; }
static int of_cuda(const char *name) {
  for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
    size_t length = strlen(prefixes[i]);
    if (!strncmp(name, prefixes[i], length) && starts_in_uppercase(name + length)) return 1;
  }
  return 0;
}

// Returns 1 if a path names a library that this one replaces: libNAME.so..., or a copy in a wheel, libNAME-HASH.so... or libNAME.HASH.so...
static int replaces(const char *path) {
  const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
  if (strncmp(name, "lib", 3)) return 0;
  for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
    size_t length = strlen(libraries[i]);
    const char *rest = name + 3 + length;
    if (strncmp(name + 3, libraries[i], length)) continue;
    if (!strncmp(rest, ".so", 3)) return 1;
    if ((*rest == '.' || *rest == '-') && strspn(rest + 1, "0123456789abcdef") == 8 && !strncmp(rest + 9, ".so", 3)) return 1;
  }
  return 0;
}

// Finds functions of CUDA that a library needs and no library has; `names` are strings of the mapped file.
static int find_missing(const char *file, size_t bytes, const char **names) {
  const Elf64_Ehdr *head = (const void *)file;
  int count = 0;
  if (bytes < sizeof *head || memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_ident[EI_CLASS] != ELFCLASS64) return 0;
  if (head->e_shoff + (size_t)head->e_shnum * sizeof(Elf64_Shdr) > bytes) return 0;
  const Elf64_Shdr *sections = (const void *)(file + head->e_shoff);
  for (int i = 0; i < head->e_shnum; i++) {
    const Elf64_Shdr *table = &sections[i], *strings = &sections[table->sh_link];
    if (table->sh_type != SHT_DYNSYM || table->sh_link >= head->e_shnum) continue;
    if (table->sh_offset + table->sh_size > bytes || strings->sh_offset + strings->sh_size > bytes) continue;
    const Elf64_Sym *symbols = (const void *)(file + table->sh_offset);
    for (size_t k = 0; k < table->sh_size / sizeof *symbols && count < MOST_MISSING; k++) {
      const char *name = file + strings->sh_offset + symbols[k].st_name;
      if (symbols[k].st_shndx != SHN_UNDEF || ELF64_ST_BIND(symbols[k].st_info) != STB_GLOBAL || !of_cuda(name)) continue;
      if (!dlsym(RTLD_DEFAULT, name)) names[count++] = name;
    }
  }
  return count;
}

// Runs build_stubs of build.py, in a process without a null device.
static void compile_stubs(char *path, const char **names, int count) {
  extern char **environ;
  char *python = getenv("NULL_CUDA_PYTHON");
  char *arguments[MOST_MISSING + 6] = {python, "-P", "-c", "from gpu_rehearsal.device.build import build_stubs; build_stubs()", path};
  int variables = 0, process;
  while (environ[variables]) variables++;
  char *environment[variables + 1], **next = environment;
  for (int i = 0; i < variables; i++)
    if (strncmp(environ[i], "LD_PRELOAD=", 11)) *next++ = environ[i];
  *next = NULL;
  memcpy(arguments + 5, names, count * sizeof *names);
  arguments[5 + count] = NULL;
  if (python && !posix_spawn(&process, python, NULL, NULL, arguments, environment)) waitpid(process, NULL, 0);
}

static const char *prepare(const char *path, void *(*open_library)(const char *, int)) {
  static char own[4096];
  Dl_info here;
  if (!*own && dladdr(prepare, &here)) snprintf(own, sizeof own, "%s", here.dli_fname);
  if (replaces(path)) return own;
  struct stat found;
  int file = strchr(path, '/') ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  char *map = file >= 0 && !fstat(file, &found) ? mmap(0, found.st_size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  if (file >= 0) close(file);
  if (map == MAP_FAILED) return path;
  const char *names[MOST_MISSING];
  int count = find_missing(map, found.st_size, names);
  if (count) {
    uint64_t hash = 0xcbf29ce484222325;
    for (int i = 0; i < count; i++)
      for (const char *c = names[i]; *c; c++) hash = (hash ^ *c) * 0x100000001b3;
    char stubs[4200];
    snprintf(stubs, sizeof stubs, "%.*s/stubs-%016lx.so", (int)(strrchr(own, '/') - own), own, (long)hash);
    if (access(stubs, R_OK)) compile_stubs(stubs, names, count);
    if (!open_library(stubs, RTLD_NOW | RTLD_GLOBAL)) {
      fprintf(stderr, "null device: %s cannot be loaded, because these functions have no stubs:", path);
      for (int i = 0; i < count; i++) fprintf(stderr, " %s", names[i]);
      fprintf(stderr, "\n");
    }
  }
  munmap(map, found.st_size);
  return path;
}

// The last call must be a tail call: a library is searched in the path of the library that opens it, which is found by the return address.
API void *dlopen(const char *path, int mode) {
  static void *(*open_library)(const char *, int);
  if (!open_library) open_library = dlsym(RTLD_NEXT, "dlopen");
  if (path && !(mode & RTLD_NOLOAD)) path = prepare(path, open_library);
  return open_library(path, mode);
}

// Functions of the driver that are looked up by name, without the suffix of their version. A function that this library does not have
// succeeds without doing anything.
static int nothing(void) { return SUCCESS; }
static int find_function(const char *name, void **out, int *result) {
  static const char *const suffixes[] = {"_v3", "_v2", ""};
  char full[256];
  *out = NULL;
  for (int i = 0; i < 3 && !*out; i++) {
    snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
    *out = dlsym(RTLD_DEFAULT, full);
  }
  if (!*out) *out = (void *)nothing;
  if (result) *result = SUCCESS;
  return SUCCESS;
}
API int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *result) { return find_function(name, out, result); }
API int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) { return find_function(name, out, NULL); }
API int cudaGetDriverEntryPoint(const char *name, void **out, uint64_t flags, int *result) { return find_function(name, out, result); }
API int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, uint64_t flags, int *result) {
  return find_function(name, out, result);
}
