// How a batch of equal problems is cut into tasks. No number here changes a result: an output is always the work of
// one task, which adds its terms in the same order.
#ifndef JAXLOWBIT_FFI_CPU_DOT_PLAN_H_
#define JAXLOWBIT_FFI_CPU_DOT_PLAN_H_

#include "ffi/cpu/dot.h"

namespace jaxlowbit {

// What one task computes.
struct DotRectangle {
  int64_t problem;  // its index
  int64_t m0, rows, o0, columns;
};

class DotPlan {
 public:
  // Rows m0 to m0 + m in rectangles of at most about most_rows x most_columns, cut at multiples of row_step and
  // column_step.
  DotPlan(const DotProblem* problems, int64_t count, int64_t m0, int64_t m, int64_t threads, int64_t row_step,
          int64_t most_rows, int64_t column_step, int64_t most_columns)
      : problems_(problems), count_(count), m0_(m0), m_(m) {
    constexpr int64_t kTasksPerThread = 6;  // so that the last thread to finish is soon done
    rows_ = std::min(RoundUp(m, row_step), RoundUp(most_rows, row_step));
    columns_ = most_columns;
    // All rows of a task share its decoded codes, so columns are cut first, and rows only for idle threads.
    while (tasks() < kTasksPerThread * threads && columns_ / 2 >= column_step) columns_ /= 2;
    while (tasks() < threads && rows_ >= 8 * row_step) rows_ = RoundUp(rows_ / 2, row_step);
  }

  const DotProblem& problem(const DotRectangle& rectangle) const { return problems_[rectangle.problem]; }

  int64_t tasks() const { return count_ * row_blocks() * column_blocks(); }

  DotRectangle Rectangle(int64_t task) const {
    const int64_t problem = task / row_blocks() / column_blocks();
    const int64_t m = task % row_blocks() * rows_, o = task / row_blocks() % column_blocks() * columns_;
    return {problem, m0_ + m, std::min(rows_, m_ - m), o, std::min(columns_, problems_->columns() - o)};
  }

 private:
  int64_t row_blocks() const { return CeilDiv(m_, rows_); }
  int64_t column_blocks() const { return CeilDiv(problems_->columns(), columns_); }

  const DotProblem* problems_;
  int64_t count_, m0_, m_, rows_, columns_;
};

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_PLAN_H_
