"""Controls of the benchmarks: solved, empty and constant answers, and settings tried one by one."""
