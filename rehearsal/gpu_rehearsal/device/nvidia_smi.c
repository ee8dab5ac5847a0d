// The program nvidia-smi, for scripts that start it to read the memory of a GPU: `-L`, `--query-gpu=… --format=csv…`, or a table.
#include "null.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

unsigned nvmlInit_v2(void), nvmlDeviceGetCount_v2(unsigned *out), nvmlDeviceGetHandleByIndex_v2(unsigned which, void **out);
unsigned nvmlDeviceGetName(void *which, char *out, unsigned bytes), nvmlDeviceGetMemoryInfo(void *which, uint64_t *out);

static void print_field(const char *field, unsigned which, const char *name, const uint64_t *mib, const char *unit) {
  static const char *memory[] = {"memory.total", "memory.free", "memory.used"};
  for (int i = 0; i < 3; i++)
    if (!strcmp(field, memory[i])) return (void)printf("%lu%s", (unsigned long)mib[i], unit);
  if (!strcmp(field, "name") || !strcmp(field, "gpu_name")) printf("%s", name);
  else if (!strcmp(field, "index")) printf("%u", which);
  else if (!strcmp(field, "driver_version")) printf("580.00");
  else if (!strcmp(field, "count")) printf("%d", card()->devices);
  else if (!strcmp(field, "compute_cap")) printf("%d.%d", card()->major, card()->minor);
  else if (!strncmp(field, "utilization.", 12)) printf("0%s", *unit ? " %" : "");
  else printf("[N/A]");
}

// Whether a list such as "0,2" contains a GPU; NULL contains all.
static int listed(const char *only, unsigned which) {
  for (const char *next = only; next; next = (next = strchr(next, ',')) ? next + 1 : NULL)
    if ((unsigned)atoi(next) == which) return 1;
  return !only;
}

int main(int count, char **arguments) {
  const char *query = NULL, *format = "", *only = NULL;
  int list = 0;
  for (int i = 1; i < count; i++) {
    if (!strncmp(arguments[i], "--query-gpu=", 12)) query = arguments[i] + 12;
    if (!strncmp(arguments[i], "--format=", 9)) format = arguments[i] + 9;
    if (!strcmp(arguments[i], "-L") || !strcmp(arguments[i], "--list-gpus")) list = 1;
    if (!strcmp(arguments[i], "-i") && i + 1 < count) only = arguments[i + 1];
    if (!strncmp(arguments[i], "--id=", 5)) only = arguments[i] + 5;
  }
  const char *unit = strstr(format, "nounits") ? "" : " MiB";
  if (query && !strstr(format, "noheader")) puts(query);
  for (unsigned which = 0; which < (unsigned)card()->devices; which++) {
    char name[256], fields[1024];
    uint64_t mib[3];
    void *handle;
    if (!listed(only, which)) continue;
    nvmlDeviceGetHandleByIndex_v2(which, &handle);
    nvmlDeviceGetName(handle, name, sizeof name);
    nvmlDeviceGetMemoryInfo(handle, mib);
    for (int i = 0; i < 3; i++) mib[i] >>= 20;
    if (query) {
      snprintf(fields, sizeof fields, "%s", query);
      for (char *field = strtok(fields, ", "), *first = field; field; field = strtok(NULL, ", ")) {
        if (field != first) printf(", ");
        print_field(field, which, name, mib, unit);
      }
      puts("");
    } else if (list) printf("GPU %u: %s (UUID: GPU-%u)\n", which, name, which);
    else printf("| %u  %s | %luMiB / %luMiB | 0%% |\n", which, name, (unsigned long)mib[2], (unsigned long)mib[0]);
  }
  return 0;
}
