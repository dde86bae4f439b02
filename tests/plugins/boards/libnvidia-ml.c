/* A driver's library of NVIDIA's with as many GPUs as a test sets; the functions of NVML that nvml.py calls. */

#include <stdio.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };

static unsigned gpus, initialised;
static int has_driver, counts_energy[8], has_power[8];
static unsigned long long millijoules[8];
static unsigned milliwatts[8];

void fake_machine(int driver, unsigned count) {
  has_driver = driver;
  gpus = count;
  initialised = 0;
}

void fake_gpu(unsigned index, int energy, unsigned long long counter_mj, int power, unsigned power_mw) {
  counts_energy[index] = energy;
  millijoules[index] = counter_mj;
  has_power[index] = power;
  milliwatts[index] = power_mw;
}

const char* nvmlErrorString(int status) {
  return status == NOT_SUPPORTED ? "Not Supported" : status == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Uninitialized";
}

int nvmlInit_v2(void) {
  initialised = has_driver;
  return has_driver ? SUCCESS : DRIVER_NOT_LOADED;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = gpus;
  return initialised ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) {
  *gpu = &milliwatts[index];
  return SUCCESS;
}

static unsigned index_of(void* gpu) { return (unsigned)((unsigned*)gpu - milliwatts); }

int nvmlDeviceGetName(void* gpu, char* name, unsigned length) {
  snprintf(name, length, "Fake %u", index_of(gpu));
  return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void* gpu, unsigned long long* energy) {
  *energy = millijoules[index_of(gpu)];
  return counts_energy[index_of(gpu)] ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(void* gpu, unsigned* power) {
  *power = milliwatts[index_of(gpu)];
  return has_power[index_of(gpu)] ? SUCCESS : NOT_SUPPORTED;
}
