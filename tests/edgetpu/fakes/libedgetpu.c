/* Stands in for libedgetpu.so.1 where no Edge TPU is: a TFLite delegate plug-in that opens the devices listed in the
 * environment variable FAKE_EDGETPUS ("usb:0,pci:0") and leaves every operator to the CPU. Addresses are read as
 * tflite/edgetpu_delegate_for_custom_op_tflite_plugin.cc of google-coral/libedgetpu reads them; unlike it, it says why
 * it gives no delegate.
 *
 * With KERNEL, the delegate takes the first operator, as the real one takes each `edgetpu-custom-op`
 * (tflite/edgetpu_delegate_for_custom_op.cc), with a kernel that computes nothing. With TF_2_5, it does so in the layout of
 * TensorFlow 2.5, with which Google built its libedgetpu 16.0 of 2021 (workspace.bzl): TFLite receives the struct by value. */

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
  delegate->prepare = prepare;
  return delegate;
}

void tflite_plugin_destroy_delegate(Delegate* delegate) { free(delegate); }
