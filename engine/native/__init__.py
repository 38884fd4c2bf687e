"""The native kernels: C sources, the table of instruction sets, and how both become a library."""
