// Kernels: CUDA source as TVM writes it, compiled by g++ after software_cuda_kernel.h, once for each source.
#include <dlfcn.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"
#include "fibers.h"

namespace software_cuda {

// Mirrors the struct in software_cuda_kernel.h.
struct Launch {
  unsigned grid[3], block[3];
  void** arguments;
  bool (*is_on_device)(const void* at);
  void (*run_fibers)(unsigned count, void (*thread)(unsigned index, void* context), void* context);
  void (*wait_for_warp)();
  void (*wait_for_block)();
};

struct Kernel {
  std::string name;
  bool (*run)(const Launch* launch);
};

struct Module {
  void* library;
  std::map<std::string, Kernel> kernels;
};

namespace {

constexpr char kHeading[] = "// software CUDA for ";
constexpr char kElf[] = "\x7f" "ELF ";

// Kernels of all devices run one at a time: they have one threadIdx, and one set of fibers.
std::mutex running;

struct Counts {
  std::mutex lock;
  std::map<std::string, long> launches;
};

Counts& counts() {
  static auto& all = *new Counts;
  return all;
}

std::string read_file(const std::string& path) {
  std::string text;
  if (FILE* file = fopen(path.c_str(), "rb")) {
    char part[1 << 14];
    while (const size_t count = fread(part, 1, sizeof part, file)) text.append(part, count);
    fclose(file);
  }
  return text;
}

bool write_file(const std::string& path, const std::string& text) {
  FILE* file = fopen(path.c_str(), "wb");
  if (!file) return false;
  const bool whole = fwrite(text.data(), 1, text.size(), file) == text.size();
  return fclose(file) == 0 && whole;
}

// What is found of a kernel in the source.
struct Found {
  std::string name;
  bool waits;
};

size_t end_of_brackets(const std::string& text, size_t at, char open, char close) {
  int depth = 0;
  for (; at < text.size(); ++at) {
    if (text[at] == open) ++depth;
    if (text[at] == close && --depth == 0) return at + 1;
  }
  return at;
}

bool is_part_of_name(char letter) { return isalnum(static_cast<unsigned char>(letter)) || letter == '_'; }

// Returns whether threads may wait for each other here, or share memory. That is said too often rather than too seldom.
bool may_wait(const std::string& text) {
  for (const char* word : {"__sync", "_sync(", "__shared__", "__activemask", "asm"})
    if (text.find(word) != std::string::npos) return true;
  return false;
}

// Returns the text without TVM's definitions of shuffles for old architectures, which every module with a shuffle has.
std::string without_shuffle_macros(std::string text) {
  const std::string begin = "#define __shfl";
  for (size_t at; (at = text.find(begin)) != std::string::npos;) {
    size_t end = text.find('\n', at);
    while (end != std::string::npos && text[end - 1] == '\\') end = text.find('\n', end + 1);
    text.erase(at, end == std::string::npos ? end : end - at);
  }
  return text;
}

// Returns the kernels that the source defines. A kernel without a wait in its own body needs no fibers, where no
// function or macro beside the kernels has one either.
std::vector<Found> kernels_in(const std::string& source) {
  std::vector<Found> kernels;
  std::string beside;
  size_t done = 0;
  for (size_t at; (at = source.find("__global__", done)) != std::string::npos;) {
    beside += source.substr(done, at - done);
    // void __launch_bounds__(64) name(parameters) { body }, or a declaration.
    size_t open = source.find('(', at);
    const size_t bounds = source.find("__launch_bounds__", at);
    if (bounds < open) open = source.find('(', end_of_brackets(source, open, '(', ')'));
    if (open == std::string::npos) break;
    size_t name_end = open;
    while (isspace(static_cast<unsigned char>(source[name_end - 1]))) --name_end;
    size_t name_begin = name_end;
    while (is_part_of_name(source[name_begin - 1])) --name_begin;
    const size_t body = source.find_first_not_of(" \t\r\n", end_of_brackets(source, open, '(', ')'));
    done = body;
    if (body == std::string::npos) break;
    if (source[body] != '{') continue;
    done = end_of_brackets(source, body, '{', '}');
    kernels.push_back({source.substr(name_begin, name_end - name_begin), may_wait(source.substr(body, done - body))});
  }
  if (done != std::string::npos) beside += source.substr(done);
  if (may_wait(without_shuffle_macros(beside)))
    for (Found& kernel : kernels) kernel.waits = true;
  return kernels;
}

std::string hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  char digits[17];
  snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

std::string cache_folder() {
  const char* value = getenv("SOFTWARE_CUDA_CACHE");
  std::string folder = value && *value ? value : SOFTWARE_CUDA_FOLDER "/kernels";
  for (size_t slash = 1; slash != std::string::npos; slash = folder.find('/', slash + 1))
    mkdir(folder.substr(0, slash).c_str(), 0700);
  mkdir(folder.c_str(), 0700);
  return folder;
}

// Names no file of another process or thread.
std::string temporary(const std::string& path) {
  static std::atomic<int> number{0};
  return path + "." + std::to_string(getpid()) + "." + std::to_string(++number);
}

// Returns the architecture of code that nvrtc made, "compute_72" or "sm_72"; "" of source.
std::string architecture_of(const std::string& image) {
  for (const std::string begin : {std::string(kHeading), std::string(kElf) + kHeading})
    if (image.compare(0, begin.size(), begin) == 0) return image.substr(begin.size(), image.find('\n') - begin.size());
  return "";
}

// Code for a virtual architecture (PTX) is for this one and all later ones; code for a real one (a cubin) is for the
// same generation, from this architecture on.
CUresult check_architecture(const std::string& architecture) {
  if (architecture.empty()) return CUDA_SUCCESS;
  const bool virtual_ = architecture.compare(0, 8, "compute_") == 0;
  const int wanted = atoi(architecture.c_str() + architecture.find('_') + 1);
  int major = 0, minor = 0;
  attribute_of(current_device(), CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major);
  attribute_of(current_device(), CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor);
  const bool fits = wanted <= 10 * major + minor && (virtual_ || wanted / 10 == major);
  return fits ? CUDA_SUCCESS : virtual_ ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

bool has_valid_size(const unsigned (&grid)[3], const unsigned (&block)[3]) {
  const auto inside = [](unsigned size, int attribute) {
    int limit = 0;
    attribute_of(current_device(), attribute, &limit);
    return size >= 1 && size <= static_cast<unsigned>(limit);
  };
  for (int i = 0; i < 3; ++i)
    if (!inside(block[i], CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i) ||
        !inside(grid[i], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i))
      return false;
  return inside(block[0] * block[1] * block[2], CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
}

}  // namespace

std::string heading(const std::string& architecture) {
  return (architecture[0] == 's' ? kElf : "") + std::string(kHeading) + architecture + "\n";
}

std::string compile(const std::string& source, std::string* log) {
  const std::string include = SOFTWARE_CUDA_FOLDER "/include";
  const std::string command = quoted(SOFTWARE_CUDA_COMPILER) +
                              " " SOFTWARE_CUDA_KERNEL_FLAGS
                              " -w -x c++ -std=c++17 -shared -fPIC -fvisibility=hidden -fno-gnu-unique -fno-exceptions"
                              " -fno-rtti -fno-strict-aliasing -fno-math-errno -fsigned-char -nostdinc++ -I" +
                              quoted(include);
  std::string text = "#include \"software_cuda_kernel.h\"\n#line 1 \"kernels.cu\"\n" + source + "\n";
  for (const Found& kernel : kernels_in(source))
    text += "SOFTWARE_CUDA_KERNEL(" + kernel.name + ", " + (kernel.waits ? "true" : "false") + ")\n";
  std::string known = command + text;
  for (const char* header : {"software_cuda_kernel.h", "cuda_fp16.h", "math_constants.h"})
    known += read_file(include + "/" + header);
  const std::string library = cache_folder() + "/" + hash_of(known) + ".so";
  if (access(library.c_str(), R_OK) == 0) return library;

  const std::string made = temporary(library), file = made + ".cu", messages = made + ".log";
  const std::string whole = command + " -o " + quoted(made) + " " + quoted(file) + " 2> " + quoted(messages);
  const bool succeeded = write_file(file, text) && system(whole.c_str()) == 0;
  if (!succeeded && log) *log = read_file(messages);
  unlink(file.c_str());
  unlink(messages.c_str());
  if (succeeded && rename(made.c_str(), library.c_str()) == 0) return library;
  unlink(made.c_str());
  return "";
}

CUresult load(const std::string& image, Module** module) {
  if (const CUresult error = device_error()) return error;
  const std::string architecture = architecture_of(image);
  if (const CUresult error = check_architecture(architecture)) return error;
  const std::string source = architecture.empty() ? image : image.substr(image.find('\n') + 1);
  const std::vector<Found> kernels = kernels_in(source);
  if (kernels.empty()) return CUDA_ERROR_INVALID_IMAGE;
  std::string log;
  const std::string library = compile(source, &log);
  void* opened = library.empty() ? nullptr : dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) {
    const char* why = library.empty() ? log.c_str() : dlerror();
    fprintf(stderr, "software CUDA: a module does not compile or load:\n%s\n", why);
    return CUDA_ERROR_INVALID_PTX;
  }
  auto* loaded = new Module{opened, {}};
  for (const Found& kernel : kernels) {
    void* run = dlsym(opened, ("software_cuda_run_" + kernel.name).c_str());
    loaded->kernels[kernel.name] = {kernel.name, reinterpret_cast<bool (*)(const Launch*)>(run)};
  }
  *module = loaded;
  return CUDA_SUCCESS;
}

void unload(Module* module) {
  dlclose(module->library);
  delete module;
}

Kernel* kernel_of(Module* module, const char* name) {
  const auto found = module->kernels.find(name);
  return found == module->kernels.end() ? nullptr : &found->second;
}

CUresult launch(Kernel* kernel, const unsigned (&grid)[3], const unsigned (&block)[3], void** arguments) {
  if (const CUresult error = device_error()) return error;
  if (!has_valid_size(grid, block)) return CUDA_ERROR_INVALID_VALUE;
  {
    std::lock_guard<std::mutex> guard(counts().lock);
    ++counts().launches[kernel->name];
  }
  if (is_due(Fault::kCrashLaunch)) {
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
  }
  if (is_due(Fault::kFailLaunch)) return lose_device(CUDA_ERROR_LAUNCH_FAILED);
  const bool hangs = is_due(Fault::kHangLaunch);
  if (hangs) hang();
  const Launch described = {{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, arguments, is_on_device,
                            run_fibers, wait_for_warp, wait_for_block};
  bool valid;
  {
    std::lock_guard<std::mutex> guard(running);
    valid = kernel->run(&described);
  }
  if (hangs) end_hang();
  return valid ? CUDA_SUCCESS : lose_device(CUDA_ERROR_ILLEGAL_ADDRESS);
}

}  // namespace software_cuda

// For tests: how often a kernel was launched; all kernels with "".
API long software_cuda_launches(const char* name) {
  std::lock_guard<std::mutex> guard(software_cuda::counts().lock);
  long count = 0;
  for (const auto& [kernel, launches] : software_cuda::counts().launches)
    if (!*name || kernel == name) count += launches;
  return count;
}
