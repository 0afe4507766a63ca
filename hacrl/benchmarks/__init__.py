"""Public sets of tasks with the settings under which they are reported; `definitions.yaml` holds them."""

from hacrl.benchmarks.benchmark import Benchmark, load_benchmarks

__all__ = ["Benchmark", "load_benchmarks"]
