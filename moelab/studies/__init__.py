"""Questions beside the loop: streaming (notebook 80), prerouter (81), routing policies (82), simulator (83), parity."""
