/* Stands in for the loader libOpenCL.so.1 as far as detection asks it. The environment variable FAKE_OPENCL lists the
 * devices, a line each, with fields between bars:
 *
 *   platform|NAME
 *   device|gpu or cpu|NAME|VENDOR|VERSION|DRIVER|MEMORY|UNIFIED|THREADS|ALIGNMENT IN BITS|EXTENSIONS|PCI BUS
 *
 * Without a line there is no platform. "crash" and "hang" are drivers that do so when they are first asked. */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEVICE_NOT_FOUND = -1, INVALID_VALUE = -30, PLATFORM_NOT_FOUND_KHR = -1001, FIELDS = 12, MOST = 16 };

typedef struct {
  char* field[FIELDS];
  int platform;
} Item;

static Item platforms[MOST], devices[MOST];
static unsigned platform_count, device_count;

static void read_list(void) {
  static int is_read;
  const char* listed = getenv("FAKE_OPENCL");
  if (!listed || is_read) return;
  is_read = 1;
  if (!strcmp(listed, "crash")) raise(SIGSEGV);
  if (!strcmp(listed, "hang")) for (;;) pause();
  puts("a driver may print what it likes");
  char *rest = strdup(listed), *line;
  while ((line = strsep(&rest, "\n"))) {
    char* kind = strsep(&line, "|");
    int is_device = !strcmp(kind, "device");
    if (!is_device && strcmp(kind, "platform")) continue;
    Item* item = is_device ? &devices[device_count++] : &platforms[platform_count++];
    for (int i = 0; i < FIELDS; ++i) item->field[i] = line ? strsep(&line, "|") : "";
    item->platform = platform_count - 1;
  }
}

static int copied(const void* value, size_t bytes, size_t room, void* to, size_t* size) {
  if (size) *size = bytes;
  if (to && room < bytes) return INVALID_VALUE;
  if (to) memcpy(to, value, bytes);
  return 0;
}

static int text(const char* value, size_t room, void* to, size_t* size) {
  return copied(value, strlen(value) + 1, room, to, size);
}

int clGetPlatformIDs(unsigned room, void** ids, unsigned* count) {
  read_list();
  if (count) *count = platform_count;
  for (unsigned i = 0; ids && i < room && i < platform_count; ++i) ids[i] = &platforms[i];
  return platform_count ? 0 : PLATFORM_NOT_FOUND_KHR;
}

int clGetPlatformInfo(void* platform, unsigned key, size_t room, void* to, size_t* size) {
  return key == 0x0902 ? text(((Item*)platform)->field[0], room, to, size) : INVALID_VALUE;
}

int clGetDeviceIDs(void* platform, unsigned long type, unsigned room, void** ids, unsigned* count) {
  unsigned found = 0;
  for (unsigned i = 0; i < device_count; ++i) {
    unsigned long own = strcmp(devices[i].field[0], "gpu") ? 2 : 4;
    if (&platforms[devices[i].platform] != platform || !(own & type)) continue;
    if (ids && found < room) ids[found] = &devices[i];
    ++found;
  }
  if (count) *count = found;
  return found ? 0 : DEVICE_NOT_FOUND;
}

int clGetDeviceInfo(void* device, unsigned key, size_t room, void* to, size_t* size) {
  char** field = ((Item*)device)->field;
  unsigned long long memory = strtoull(field[5], NULL, 10);
  unsigned unified = atoi(field[6]), alignment = atoi(field[8]);
  size_t threads = strtoull(field[7], NULL, 10);
  unsigned pci[4] = {0, atoi(field[10]), 0, 0};
  switch (key) {
    case 0x102B: return text(field[1], room, to, size);
    case 0x102C: return text(field[2], room, to, size);
    case 0x102F: return text(field[3], room, to, size);
    case 0x102D: return text(field[4], room, to, size);
    case 0x1030: return text(field[9], room, to, size);
    case 0x101F: return copied(&memory, sizeof memory, room, to, size);
    case 0x1035: return copied(&unified, sizeof unified, room, to, size);
    case 0x1004: return copied(&threads, sizeof threads, room, to, size);
    case 0x1019: return copied(&alignment, sizeof alignment, room, to, size);
    case 0x410F: return *field[10] ? copied(pci, sizeof pci, room, to, size) : INVALID_VALUE;
  }
  return INVALID_VALUE;
}
