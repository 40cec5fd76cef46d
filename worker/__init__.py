"""The worker process: messages, queues, scheduler, page manager, supervisor. Knows no RPC and no CUDA."""
