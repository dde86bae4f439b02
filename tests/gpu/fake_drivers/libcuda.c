/* Stands in for CUDA's driver libcuda.so.1 as far as detection asks it. The environment variable FAKE_CUDA lists the
 * devices, a line each: NAME|MAJOR|MINOR|MEMORY|INTEGRATED|PCI BUS. Without a line there is none. "crash" and "hang" are
 * drivers that do so when they are first asked, "mismatch" is one that does not fit the kernel's module. */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, NO_DEVICE = 100, DRIVER_MISMATCH = 803, FIELDS = 6, MOST = 16 };

static char* devices[MOST][FIELDS];
static int device_count;

int cuInit(unsigned flags) {
  const char* listed = getenv("FAKE_CUDA");
  if (!listed || !*listed) return NO_DEVICE;
  if (!strcmp(listed, "crash")) raise(SIGSEGV);
  if (!strcmp(listed, "hang")) for (;;) pause();
  if (!strcmp(listed, "mismatch")) return DRIVER_MISMATCH;
  char *rest = strdup(listed), *line;
  while ((line = strsep(&rest, "\n")))
    if (*line) {
      for (int i = 0; i < FIELDS; ++i) devices[device_count][i] = line ? strsep(&line, "|") : "";
      ++device_count;
    }
  return 0;
}

int cuGetErrorName(int status, const char** name) {
  *name = status == DRIVER_MISMATCH ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : NULL;
  return *name ? 0 : INVALID_VALUE;
}

int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
int cuDeviceGetCount(int* count) { return *count = device_count, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, index < device_count ? 0 : INVALID_VALUE; }

int cuDeviceGetName(char* name, int room, int device) { return snprintf(name, room, "%s", devices[device][0]), 0; }

int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = strtoull(devices[device][3], NULL, 10), 0; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 75: return *value = atoi(devices[device][1]), 0;
    case 76: return *value = atoi(devices[device][2]), 0;
    case 18: return *value = atoi(devices[device][4]), 0;
    case 33: return *value = atoi(devices[device][5]), 0;
    case 34: case 50: return *value = 0, 0;
  }
  return INVALID_VALUE;
}
