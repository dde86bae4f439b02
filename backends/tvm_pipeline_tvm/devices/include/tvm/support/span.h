// What tvm/runtime/metadata.h needs of a header that TVM 0.19 on PyPI leaves out.
#pragma once
#include <cstddef>

namespace tvm {
namespace support {

template <typename Stored, typename Seen>
class Span {
 public:
  Span(Stored* begin, int count) : begin_(begin), end_(begin + count) {}
  Span(Stored* begin, Stored* end) : begin_(begin), end_(end) {}
  Stored* begin() const { return begin_; }
  Stored* end() const { return end_; }
  size_t size() const { return end_ - begin_; }
  Seen operator[](int index) const { return begin_[index]; }

 private:
  Stored *begin_, *end_;
};

}  // namespace support
}  // namespace tvm
