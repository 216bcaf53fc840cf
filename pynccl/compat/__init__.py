"""The names of other wrappers of NCCL over this one: a program that uses theirs changes an import line.

vllm     NCCLLibrary, PyNcclCommunicator, StatelessProcessGroup, as vLLM has them
sglang   PyNcclCommunicator as SGLang has it, which is that of older vLLM

Nothing here is imported by `import pynccl`. docs/coming_from.md says what differs.
"""
