"""The command line: `pccl master`, `pccl demo`, `pccl bench`, `pccl doctor`."""
