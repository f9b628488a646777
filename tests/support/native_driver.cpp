// Driver of the native library under emulation: runs the calls of one file, and writes all memory to another.
//
//   native_driver IN OUT [ISA]
//
// ISA: the instruction set that runs, by default the best. Prints its name.
//
// IN, in the machine's byte order: the number of buffers (int32), of each its size (int64) and bytes; the number of pointers
// inside buffers (int32), of each its buffer (int32), offset (int64), and what it points to, buffer (int32) and offset
// (int64); the calls: the length of a name (int32), the name, the number of arguments (int32), of each a kind and a value:
// 'i' int64, 'f' float, 'p' the pool, '0' null, 'b' a pointer (int32, int64).
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

extern "C" {
void* lp_pool_new(int);
const char* lp_isa();
int lp_use_isa(const char*);
void lp_round_int4(void*, int, void*, int64_t, int64_t, int, void*, void*);
void lp_pack(void*, int, int, const void*, const void*, int64_t, int64_t, int64_t, void*);
void lp_pack_pair(void*, int, int, const void*, const void*, const void*, const void*, int64_t, int64_t, int64_t, void*);
void lp_linear(void*, int, const void*, int64_t, int, int64_t, const void*, int, int64_t, const void*, void*, int64_t);
void lp_linears(void*, int, int, const void*, int64_t, int, const void*, int, const void*, void*);
void lp_lora(void*, int, const void*, int64_t, int, const void*, const void*, void*, void*, int64_t, int64_t);
void lp_dense(void*, int, const void*, int64_t, int, int64_t, const void*, int64_t, const void*, void*, int64_t);
void lp_attend(void*, int, const void*, void*, const void*, const void*, int, int, int, int, float, float, int64_t, int64_t,
               const void*, const void*, int64_t, const void*);
void lp_gated_norm(void*, int, int, const void*, const void*, const void*, int, int64_t, float, int, void*);
void lp_gate(void*, int, int, const void*, int64_t, const void*, int64_t, int, int64_t, void*);
void lp_rms_norm(void*, int, const void*, const void*, int, int64_t, float, float, int, void*);
void lp_argmax(void*, int, const void*, int, int64_t, const void*, const void*, int64_t, void*, void*);
void lp_stack_run(void*, const void*, const void*);
void lp_experts_run(void*, const void*, const void*);  // whether experts are there, which a program knows
void lp_attend_linearly(void*, int, const void*, const void*);
void lp_convolve(void*, int, const void*, int64_t, const float*, const float*, int, int64_t, int, void*, void*, const void*);
void lp_scan(void*, const float*, const float*, const float*, const float*, const float*, int64_t, int64_t, float*, float*,
             const void*);
}

namespace {

class Program {
 public:
  explicit Program(const char* path) : in_(path, std::ios::binary), pool_(lp_pool_new(2)) {
    const int num_buffers = read<int32_t>();
    for (int i = 0; i < num_buffers; i++) {
      const int64_t size = read<int64_t>();
      void* memory = std::aligned_alloc(64, size_t((size + 63) / 64 * 64 + 64));
      in_.read(static_cast<char*>(memory), size);
      buffers_.push_back({static_cast<char*>(memory), size});
    }
    const int num_pointers = read<int32_t>();
    for (int i = 0; i < num_pointers; i++) {
      const int buffer = read<int32_t>();
      const int64_t offset = read<int64_t>();
      const void* to = pointer();
      std::memcpy(buffers_[size_t(buffer)].memory + offset, &to, sizeof to);
    }
  }

  void run() {
    const std::map<std::string, std::function<void()>> functions{
        {"lp_pack", [this] { call(lp_pack); }},         {"lp_pack_pair", [this] { call(lp_pack_pair); }},
        {"lp_linears", [this] { call(lp_linears); }},
        {"lp_linear", [this] { call(lp_linear); }},     {"lp_lora", [this] { call(lp_lora); }},
        {"lp_dense", [this] { call(lp_dense); }},       {"lp_attend", [this] { call(lp_attend); }},
        {"lp_rms_norm", [this] { call(lp_rms_norm); }}, {"lp_argmax", [this] { call(lp_argmax); }},
        {"lp_gated_norm", [this] { call(lp_gated_norm); }}, {"lp_gate", [this] { call(lp_gate); }},
        {"lp_stack_run", [this] { call(lp_stack_run); }}, {"lp_round_int4", [this] { call(lp_round_int4); }},
        {"lp_convolve", [this] { call(lp_convolve); }}, {"lp_scan", [this] { call(lp_scan); }},
        {"lp_attend_linearly", [this] { call(lp_attend_linearly); }}, {"lp_experts_run", [this] { call(lp_experts_run); }},
    };
    while (in_.peek() != EOF) {
      std::string name(size_t(read<int32_t>()), ' ');
      in_.read(name.data(), std::streamsize(name.size()));
      read<int32_t>();
      functions.at(name)();
    }
  }

  void write(const char* path) const {
    std::ofstream out(path, std::ios::binary);
    for (const Buffer& buffer : buffers_) out.write(buffer.memory, buffer.size);
  }

 private:
  struct Buffer {
    char* memory;
    int64_t size;
  };

  template <class T>
  T read() {
    T value;
    in_.read(reinterpret_cast<char*>(&value), sizeof value);
    if (!in_) throw std::runtime_error("the file is cut off");
    return value;
  }

  void* pointer() {
    const int buffer = read<int32_t>();
    return buffers_[size_t(buffer)].memory + read<int64_t>();
  }

  template <class T>
  T argument() {
    const char kind = read<char>();
    if constexpr (std::is_pointer_v<T>) {
      return static_cast<T>(kind == 'p' ? pool_ : kind == '0' ? nullptr : pointer());
    } else if constexpr (std::is_floating_point_v<T>) {
      return read<float>();
    } else {
      return T(read<int64_t>());
    }
  }

  template <class... A>
  void call(void (*function)(A...)) {
    std::apply(function, std::tuple<A...>{argument<A>()...});  // braces keep the order
  }

  std::ifstream in_;
  void* pool_;
  std::vector<Buffer> buffers_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count > 3 && lp_use_isa(arguments[3]) != 0) {
    std::cerr << "no kernels for " << arguments[3] << std::endl;
    return 1;
  }
  Program program(arguments[1]);
  program.run();
  program.write(arguments[2]);
  std::cout << lp_isa() << std::endl;
  return 0;
}
