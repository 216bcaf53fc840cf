"""vLLM's names over this package: a program that uses its wrapper of NCCL changes an import line.

vllm     NCCLLibrary, PyNcclCommunicator, StatelessProcessGroup, as vLLM has them

Nothing here is imported by `import pynccl`. docs/coming_from.md says what differs.
"""
