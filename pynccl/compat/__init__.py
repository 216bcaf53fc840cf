"""Drop-in replacements for other NCCL wrappers: programs change only an import line.

vllm     vLLM's NCCLLibrary, PyNcclCommunicator and StatelessProcessGroup
sglang   SGLang's PyNcclCommunicator, which follows an older vLLM

`import pynccl` imports none of these modules. See docs/coming_from.md for the differences.
"""
