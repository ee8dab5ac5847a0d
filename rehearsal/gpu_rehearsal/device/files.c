// Files: a large write of zeros makes a hole, which reads as zeros but takes no disk space. Weights on a null device are zeros, so
// their checkpoints would otherwise fill the disk.
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LARGE = 64 << 10 };

static int all_zeros(const char *at, size_t bytes) { return !*at && !memcmp(at, at + 1, bytes - 1); }

static int leave_hole(int file, size_t bytes) {
  struct stat found;
  if (fstat(file, &found) || !S_ISREG(found.st_mode) || fcntl(file, F_GETFL) & O_APPEND) return 0;
  off_t at = lseek(file, 0, SEEK_CUR), end = at + (off_t)bytes;
  if (at < found.st_size && fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes)) return 0;
  return !(end > found.st_size && ftruncate(file, end)) && lseek(file, end, SEEK_SET) == end;
}

API ssize_t write(int file, const void *from, size_t bytes) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "write");
  return bytes >= LARGE && all_zeros(from, bytes) && leave_hole(file, bytes) ? (ssize_t)bytes : real(file, from, bytes);
}

API ssize_t writev(int file, const struct iovec *parts, int count) { // called by libstdc++, and thereby by torch.save
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  int large = 0;
  for (int i = 0; i < count; i++) large |= parts[i].iov_len >= LARGE;
  if (!large) return real(file, parts, count);
  ssize_t done = 0;
  for (int i = 0; i < count; i++) {
    ssize_t wrote = write(file, parts[i].iov_base, parts[i].iov_len);
    if (wrote < 0) return done ? done : wrote;
    done += wrote;
    if ((size_t)wrote < parts[i].iov_len) break;
  }
  return done;
}
