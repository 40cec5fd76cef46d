"""Models and the engines that run them. Knows no request, no RPC and no queue."""
