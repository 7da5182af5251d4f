"""The `pccl` command and its sub-commands."""
