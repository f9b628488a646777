// Rows of a step whose output is read, as a step of their own: of a prompt it is the last token's alone.
#pragma once

#include "lora.h"

namespace lp {

class OutputRows {
 public:
  // `rows`: [num_rows] of the step, each greater than the one before.
  OutputRows(const LpSpans& spans, const LpRuns& runs, const int32_t* rows, int num_rows)
      : rows_(rows), num_rows_(num_rows) {
    take_spans(spans);
    take_runs(runs);
  }

  int num_rows() const { return num_rows_; }
  const LpSpans& spans() const { return spans_; }
  const LpRuns& runs() const { return runs_; }

  // Rows of num_bytes each, from the step's.
  void gather(const char* from, int64_t num_bytes, char* to) const {
    for (int i = 0; i < num_rows_; i++) std::memcpy(to + i * num_bytes, from + rows_[i] * num_bytes, size_t(num_bytes));
  }

  void scatter(const char* from, int64_t num_bytes, char* to) const {
    for (int i = 0; i < num_rows_; i++) std::memcpy(to + rows_[i] * num_bytes, from + i * num_bytes, size_t(num_bytes));
  }

 private:
  // Rows that follow each other in a span are a span, which ends with the last of them.
  void take_spans(const LpSpans& spans) {
    query_starts_.push_back(0);
    for (int i = 0, span = 0; i < num_rows_; i++) {
      while (rows_[i] >= spans.query_starts[span + 1]) span++;
      const int64_t end = spans.query_starts[span + 1];
      if (i + 1 < num_rows_ && rows_[i + 1] == rows_[i] + 1 && rows_[i + 1] < end) continue;
      query_starts_.push_back(i + 1);
      context_lens_.push_back(spans.context_lens[span] - (end - 1 - rows_[i]));
      const int64_t* table = spans.block_tables + span * spans.table_stride;
      block_tables_.insert(block_tables_.end(), table, table + spans.table_stride);
    }
    spans_ = spans;
    spans_.num_spans = int32_t(context_lens_.size());
    spans_.query_starts = query_starts_.data();
    spans_.context_lens = context_lens_.data();
    spans_.block_tables = block_tables_.data();
    spans_.slots = nullptr;  // keys and values are in their pages already
  }

  void take_runs(const LpRuns& runs) {
    first_uses_.push_back(0);
    for (int run = 0; run < runs.num_runs; run++) {
      const auto place = [&](int row) { return int32_t(std::lower_bound(rows_, rows_ + num_rows_, row) - rows_); };
      const int32_t start = place(runs.starts[run]), end = place(runs.ends[run]);
      if (start == end) continue;
      starts_.push_back(start);
      ends_.push_back(end);
      slots_.insert(slots_.end(), runs.slots + runs.first_uses[run], runs.slots + runs.first_uses[run + 1]);
      weights_.insert(weights_.end(), runs.weights + runs.first_uses[run], runs.weights + runs.first_uses[run + 1]);
      first_uses_.push_back(int32_t(slots_.size()));
    }
    runs_ = {int32_t(starts_.size()), runs.max_rank, starts_.data(), ends_.data(), first_uses_.data(), slots_.data(),
             weights_.data()};
  }

  const int32_t* const rows_;
  const int num_rows_;
  std::vector<int64_t> query_starts_, context_lens_, block_tables_;
  std::vector<int32_t> starts_, ends_, first_uses_, slots_;
  std::vector<float> weights_;
  LpSpans spans_;
  LpRuns runs_;
};

}  // namespace lp
