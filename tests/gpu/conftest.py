"""The worker's fixtures, for tests that need a CUDA device."""

from tests.worker_svc.conftest import greedy, llama_folder, start_worker, worker

__all__ = ["greedy", "llama_folder", "start_worker", "worker"]
