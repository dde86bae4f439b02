/* Stands in for libedgetpu.so.1 where no Edge TPU is: a TFLite delegate plug-in that opens the devices listed in the
 * environment variable FAKE_EDGETPUS ("usb:0,pci:0") and leaves every operator to the CPU. Addresses are read as
 * tflite/edgetpu_delegate_for_custom_op_tflite_plugin.cc of google-coral/libedgetpu reads them; unlike it, it says why
 * it gives no delegate. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static int take_nothing(void* context, Delegate* delegate) { return 0; /* kTfLiteOk */ }

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

Delegate* tflite_plugin_create_delegate(char** keys, char** values, size_t count, void (*report_error)(const char*)) {
  const char* address = "";
  for (size_t i = 0; i < count; ++i)
    if (!strcmp(keys[i], "device")) address = values[i];
  if (!is_listed(address)) {
    char message[128];
    snprintf(message, sizeof message, "the fake libedgetpu has no device '%.60s'", address);
    report_error(message);
    return NULL;
  }
  Delegate* delegate = calloc(1, sizeof *delegate);
  delegate->prepare = take_nothing;
  return delegate;
}

void tflite_plugin_destroy_delegate(Delegate* delegate) { free(delegate); }
