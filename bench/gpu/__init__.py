"""What a machine with one NVIDIA GPU has to show of dtf, and what can be rehearsed of it without one."""
