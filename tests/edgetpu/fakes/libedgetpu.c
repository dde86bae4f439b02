/* Stands in for libedgetpu.so.1 where no Edge TPU is: a TFLite delegate plug-in that opens the devices listed in the
 * environment variable FAKE_EDGETPUS ("usb:0,pci:0") and leaves every operator to the CPU. Addresses are read as
 * tflite/edgetpu_delegate_for_custom_op_tflite_plugin.cc of google-coral/libedgetpu reads them; unlike it, it says why
 * it gives no delegate.
 *
 * FAKE_EDGETPU_USB, a folder in the form of /sys/bus/usb/devices, takes its place for sticks, and the file `opened` in it gets
 * the name of each stick that is opened. As in the real library, sticks with their boot loader come before the others
 * (driver/beagle/beagle_usb_driver_provider.cc, Enumerate), and to open one of them loads its firmware, after which the
 * stick has other numbers and a new address on the bus. A stick that is open is shared within its process
 * (tflite/edgetpu_manager_direct.cc, OpenDeviceInternal), and busy for all others, as libusb_claim_interface has it. A byte in
 * its named pipe `fault` is a USB fault: the thread of its events ends the process by LOG(FATAL) (driver/usb/usb_driver.cc).
 *
 * With KERNEL, the delegate takes the first operator, as the real one takes each `edgetpu-custom-op`
 * (tflite/edgetpu_delegate_for_custom_op.cc), with a kernel that computes nothing. With TF_2_5, it does so in the layout of
 * TensorFlow 2.5, with which Google built its libedgetpu 16.0 of 2021 (workspace.bzl): TFLite receives the struct by value. */

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* TfLiteDelegate of tensorflow/lite/core/c/common.h; what it points to is of no interest here. */
typedef struct Delegate {
  void* data;
  int (*prepare)(void* context, struct Delegate* delegate);
  int (*copy_from_buffer_handle)(void*, struct Delegate*, int, void*);
  int (*copy_to_buffer_handle)(void*, struct Delegate*, int, void*);
  void (*free_buffer_handle)(void*, struct Delegate*, int*);
  int64_t flags;
  void* opaque_delegate_builder;
} Delegate;

#ifdef KERNEL
typedef struct { int size; int data[1]; } IntArray;

/* TfLiteRegistration: tensorflow/lite/c/common.h of TF 2.5, and tensorflow/lite/core/c/common.h. */
typedef struct {
  void* (*init)(void*, const char*, size_t);
  void (*free)(void*, void*);
  int (*prepare)(void*, void*);
  int (*invoke)(void*, void*);
  const char* (*profiling_string)(const void*, const void*);
  int32_t builtin_code;
  const char* custom_name;
  int version;
#ifndef TF_2_5
  void* registration_external;
  void* async_kernel;
  uint64_t inplace_operator;
#endif
} Registration;

/* The beginning of TfLiteContext, which both layouts share. */
typedef struct {
  size_t tensors_size;
  int (*get_execution_plan)(void*, IntArray**);
  void *tensors, *impl;
  void *resize_tensor, *report_error, *add_tensors, *get_node_and_registration;
  int (*replace_node_subsets)(void*, Registration, const IntArray*, Delegate*);
} Context;

static void* make_state(void* context, const char* buffer, size_t length) { return malloc(8); }
static void free_state(void* context, void* state) { free(state); }
static int compute_nothing(void* context, void* node) { return 0; }

static int prepare(void* context, Delegate* delegate) {
  IntArray* plan;
  if (((Context*)context)->get_execution_plan(context, &plan)) return 1;
  IntArray first = {1, {plan->data[0]}};
  Registration kernel = {.init = make_state, .free = free_state, .prepare = compute_nothing, .invoke = compute_nothing,
                         .custom_name = "EdgeTpuDelegateForCustomOp", .version = 1};
  return ((Context*)context)->replace_node_subsets(context, kernel, &first, delegate);
}
#else
static int prepare(void* context, Delegate* delegate) { return 0; /* kTfLiteOk */ }
#endif

const char* edgetpu_version(void) { return "BuildLabel(FAKE), RuntimeVersion(14)"; }

/* "" is any device, "usb" any of a kind, ":1" the second of all, "usb:1" this one. */
static int is_listed(const char* address) {
  const char* listed = getenv("FAKE_EDGETPUS");
  char* devices = strdup(listed ? listed : "");
  int found = 0, place = 0;
  for (char* device = strtok(devices, ","); device && !found; device = strtok(NULL, ","), ++place)
    found = address[0] == ':' ? atoi(address + 1) == place
            : strchr(address, ':') ? !strcmp(address, device)
                                   : !strncmp(address, device, strlen(address));
  free(devices);
  return found;
}

typedef struct { char name[64]; int is_cold, address; } Stick;

static void line(char* text, size_t size, const char* stick, const char* key, const char* written) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s/%s", getenv("FAKE_EDGETPU_USB"), stick, key);
  FILE* file = fopen(path, written ? "w" : "r");
  if (!written) text[0] = 0;
  if (!file) return;
  if (written) fprintf(file, "%s\n", written);
  else if (fgets(text, size, file)) text[strcspn(text, "\n")] = 0;
  fclose(file);
}

static int before(const void* a, const void* b) {
  const Stick *left = a, *right = b;
  return left->is_cold != right->is_cold ? right->is_cold - left->is_cold : left->address - right->address;
}

static int list_sticks(Stick* sticks, int most) {
  DIR* folder = opendir(getenv("FAKE_EDGETPU_USB"));
  int count = 0;
  for (struct dirent* entry; folder && count < most && (entry = readdir(folder));) {
    char vendor[16], address[16];
    line(vendor, sizeof vendor, entry->d_name, "idVendor", NULL);
    line(address, sizeof address, entry->d_name, "devnum", NULL);
    if (strcmp(vendor, "1a6e") && strcmp(vendor, "18d1")) continue;
    snprintf(sticks[count].name, sizeof sticks[count].name, "%s", entry->d_name);
    sticks[count].is_cold = !strcmp(vendor, "1a6e");
    sticks[count++].address = atoi(address);
  }
  if (folder) closedir(folder);
  qsort(sticks, count, sizeof *sticks, before);
  return count;
}

typedef struct { char name[64]; int users, lock, fault; pthread_t events; } Device;
static Device devices[8];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static void* handle_events(void* device) {
  char fault;
  if (read(((Device*)device)->fault, &fault, 1) != 1) return NULL;
  fprintf(stderr, "F driver/usb/usb_driver.cc:1148] HandleQueuedBulkIn transfer in failed. Unknown: USB transfer error 1\n");
  abort();
}

static int file_of(const char* stick, const char* name, int flags) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s/%s", getenv("FAKE_EDGETPU_USB"), stick, name);
  return open(path, flags | O_CLOEXEC, 0666);
}

static Device* open_stick(int index) {
  Stick sticks[8];
  int count = list_sticks(sticks, 8), highest = 0;
  if (index >= count) return NULL;
  Device* device = NULL;
  for (int i = 7; i >= 0; --i)
    if (!devices[i].users) device = &devices[i];
  for (int i = 0; i < 8; ++i)
    if (devices[i].users && !strcmp(devices[i].name, sticks[index].name)) device = &devices[i];
  if (!device->users) {
    device->lock = file_of(sticks[index].name, "lock", O_RDWR | O_CREAT);
    if (flock(device->lock, LOCK_EX | LOCK_NB)) {
      close(device->lock);
      return NULL;
    }
    strcpy(device->name, sticks[index].name);
    device->fault = file_of(sticks[index].name, "fault", O_RDWR); /* which does not wait for a writer */
    pthread_create(&device->events, NULL, handle_events, device);
  }
  ++device->users;
  for (int i = 0; i < count; ++i)
    if (sticks[i].address > highest) highest = sticks[i].address;
  if (sticks[index].is_cold) {
    char address[16];
    snprintf(address, sizeof address, "%d", highest + 1);
    line(NULL, 0, sticks[index].name, "idVendor", "18d1");
    line(NULL, 0, sticks[index].name, "idProduct", "9302");
    line(NULL, 0, sticks[index].name, "devnum", address);
  }
  char path[4096];
  snprintf(path, sizeof path, "%s/opened", getenv("FAKE_EDGETPU_USB"));
  FILE* file = fopen(path, "a");
  fprintf(file, "%s\n", sticks[index].name);
  fclose(file);
  return device;
}

static void close_stick(Device* device) {
  if (!device || --device->users) return;
  pthread_cancel(device->events);
  pthread_join(device->events, NULL);
  close(device->fault);
  close(device->lock);
}

/* tflite/public/edgetpu_c.h */
struct edgetpu_device { int type; const char* path; };

struct edgetpu_device* edgetpu_list_devices(size_t* count) {
  static struct edgetpu_device listed[8]; /* one thread asks */
  static Stick sticks[8];
  *count = getenv("FAKE_EDGETPU_USB") ? list_sticks(sticks, 8) : 0;
  for (size_t i = 0; i < *count; ++i) listed[i] = (struct edgetpu_device){1 /* EDGETPU_APEX_USB */, sticks[i].name};
  return listed;
}

void edgetpu_free_devices(struct edgetpu_device* devices) {}

Delegate* tflite_plugin_create_delegate(char** keys, char** values, size_t count, void (*report_error)(const char*)) {
  const char* address = "";
  for (size_t i = 0; i < count; ++i)
    if (!strcmp(keys[i], "device")) address = values[i];
  Device* stick = NULL;
  int is_there;
  if (getenv("FAKE_EDGETPU_USB") && !strncmp(address, "usb:", 4)) {
    pthread_mutex_lock(&opening);
    is_there = (stick = open_stick(atoi(address + 4))) != NULL;
    pthread_mutex_unlock(&opening);
  } else {
    is_there = is_listed(address);
  }
  if (!is_there) {
    char message[128];
    snprintf(message, sizeof message, "the fake libedgetpu has no device '%.60s'", address);
    report_error(message);
    return NULL;
  }
  Delegate* delegate = calloc(1, sizeof *delegate);
  delegate->prepare = prepare;
  delegate->data = stick;
  return delegate;
}

void tflite_plugin_destroy_delegate(Delegate* delegate) {
  if (!delegate) return; /* a Delegate of Python that could not be made */
  pthread_mutex_lock(&opening);
  close_stick(delegate->data);
  pthread_mutex_unlock(&opening);
  free(delegate);
}
