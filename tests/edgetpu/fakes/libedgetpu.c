/* Stands in for libedgetpu.so.1 where no Edge TPU is, and leaves every operator to the CPU. Devices are listed, opened by
 * path, and by index through TFLite's plug-in, as tflite/edgetpu_c.cc and
 * tflite/edgetpu_delegate_for_custom_op_tflite_plugin.cc of google-coral/libedgetpu do it.
 *
 * FAKE_EDGETPUS ("usb:0,pci:0") has the devices, or FAKE_EDGETPU_USB, a folder in the form of /sys/bus/usb/devices, in which the
 * file `opened` gets the name of each stick that is opened, with the options. As in the real library, sticks with their
 * boot loader come before the others (driver/beagle/beagle_usb_driver_provider.cc, Enumerate), and to open one of them loads
 * its firmware, after which the stick has other numbers and a new address on the bus. A stick that is open is shared within
 * its process (tflite/edgetpu_manager_direct.cc, OpenDeviceInternal), and busy for all others, as libusb_claim_interface has
 * it. A byte in its named pipe `fault` is a USB fault: the thread of its events ends the process by LOG(FATAL)
 * (driver/usb/usb_driver.cc). To open it takes until there is a byte in its named pipe `slow`, if it has one, because the real
 * library resets the port and waits (usb_driver.cc). The file `aborts` says how many opens end by LOG(FATAL).
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

static Device* open_stick(const char* name, const char* options) {
  Stick sticks[8];
  int count = list_sticks(sticks, 8), highest = 0, index = 0;
  while (index < count && strcmp(sticks[index].name, name)) ++index;
  if (index == count) return NULL;
  Device* device = NULL;
  for (int i = 7; i >= 0; --i)
    if (!devices[i].users) device = &devices[i];
  for (int i = 0; i < 8; ++i)
    if (devices[i].users && !strcmp(devices[i].name, name)) device = &devices[i];
  if (!device->users) {
    device->lock = file_of(name, "lock", O_RDWR | O_CREAT);
    if (flock(device->lock, LOCK_EX | LOCK_NB)) {
      close(device->lock);
      return NULL;
    }
    char text[16], byte;
    line(text, sizeof text, name, "aborts", NULL);
    if (atoi(text)) {
      snprintf(text, sizeof text, "%d", atoi(text) - 1);
      line(NULL, 0, name, "aborts", text);
      abort();
    }
    int slow = file_of(name, "slow", O_RDONLY);
    while (slow >= 0 && read(slow, &byte, 1) != 1) {
      close(slow);
      slow = file_of(name, "slow", O_RDONLY);
    }
    if (slow >= 0) close(slow);
    strcpy(device->name, name);
    device->fault = file_of(name, "fault", O_RDWR); /* which does not wait for a writer */
    pthread_create(&device->events, NULL, handle_events, device);
  }
  ++device->users;
  for (int i = 0; i < count; ++i)
    if (sticks[i].address > highest) highest = sticks[i].address;
  if (sticks[index].is_cold) {
    char address[16];
    snprintf(address, sizeof address, "%d", highest + 1);
    line(NULL, 0, name, "idVendor", "18d1");
    line(NULL, 0, name, "idProduct", "9302");
    line(NULL, 0, name, "devnum", address);
  }
  char path[4096];
  snprintf(path, sizeof path, "%s/opened", getenv("FAKE_EDGETPU_USB"));
  FILE* file = fopen(path, "a");
  fprintf(file, "%s%s\n", name, options);
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
enum { EDGETPU_APEX_PCI = 0, EDGETPU_APEX_USB = 1 };
struct edgetpu_device { int type; const char* path; };
struct edgetpu_option { const char *name, *value; };

#define USB "/sys/bus/usb/devices/"
#define PCI "/dev/apex_"

struct edgetpu_device* edgetpu_list_devices(size_t* count) {
  struct { struct edgetpu_device devices[8]; char paths[8][96]; }* listed = calloc(1, sizeof *listed);
  *count = 0;
  if (getenv("FAKE_EDGETPU_USB")) {
    Stick sticks[8];
    *count = list_sticks(sticks, 8);
    for (size_t i = 0; i < *count; ++i) {
      snprintf(listed->paths[i], sizeof *listed->paths, USB "%s", sticks[i].name);
      listed->devices[i].type = EDGETPU_APEX_USB;
    }
  } else {
    char *names = strdup(getenv("FAKE_EDGETPUS") ? getenv("FAKE_EDGETPUS") : ""), *rest;
    for (char* name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
      int is_usb = !strncmp(name, "usb", 3), index = atoi(name + 4);
      snprintf(listed->paths[*count], sizeof *listed->paths, is_usb ? USB "1-%d" : PCI "%d", is_usb ? index + 1 : index);
      listed->devices[(*count)++].type = is_usb ? EDGETPU_APEX_USB : EDGETPU_APEX_PCI;
    }
    free(names);
  }
  for (size_t i = 0; i < *count; ++i) listed->devices[i].path = listed->paths[i];
  return (struct edgetpu_device*)listed;
}

void edgetpu_free_devices(struct edgetpu_device* devices) { free(devices); }

Delegate* edgetpu_create_delegate(int type, const char* path, const struct edgetpu_option* options, size_t count) {
  Device* stick = NULL;
  pthread_mutex_lock(&opening);
  size_t listed_count, found = 0;
  struct edgetpu_device* listed = edgetpu_list_devices(&listed_count);
  while (found < listed_count && (listed[found].type != type || strcmp(listed[found].path, path))) ++found;
  int is_there = found < listed_count;
  edgetpu_free_devices(listed);
  if (is_there && getenv("FAKE_EDGETPU_USB")) {
    char text[256] = "";
    for (size_t i = 0; i < count; ++i) {
      strcat(strcat(strcat(strcat(text, ","), options[i].name), "="), options[i].value);
    }
    is_there = (stick = open_stick(path + strlen(USB), text)) != NULL;
  }
  pthread_mutex_unlock(&opening);
  if (!is_there) return NULL;
  Delegate* delegate = calloc(1, sizeof *delegate);
  delegate->prepare = prepare;
  delegate->data = stick;
  return delegate;
}

void edgetpu_free_delegate(Delegate* delegate) {
  if (!delegate) return; /* a Delegate of Python that could not be made */
  pthread_mutex_lock(&opening);
  close_stick(delegate->data);
  pthread_mutex_unlock(&opening);
  free(delegate);
}

Delegate* tflite_plugin_create_delegate(char** keys, char** values, size_t count, void (*report_error)(const char*)) {
  const char *address = "", *colon;
  for (size_t i = 0; i < count; ++i)
    if (!strcmp(keys[i], "device")) address = values[i];
  int index = (colon = strchr(address, ':')) ? atoi(colon + 1) : 0;
  size_t listed_count;
  struct edgetpu_device* listed = edgetpu_list_devices(&listed_count);
  Delegate* delegate = NULL;
  for (size_t i = 0; i < listed_count && !delegate; ++i) {
    const char* kind = listed[i].type == EDGETPU_APEX_USB ? "usb" : "pci";
    if ((address[0] && address[0] != ':' && strncmp(address, kind, 3)) || index--) continue;
    delegate = edgetpu_create_delegate(listed[i].type, listed[i].path, NULL, 0);
    break;
  }
  edgetpu_free_devices(listed);
  return delegate;
}

void tflite_plugin_destroy_delegate(Delegate* delegate) { edgetpu_free_delegate(delegate); }
