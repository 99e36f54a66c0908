"""The same GPT with its embedding tied to its head, as GPT-2 has it."""

from nanogpt import GPT, GPTConfig, data, loss  # noqa: F401 - data and loss are looked for here


class TiedGPT(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.wte.weight = self.lm_head.weight


def model():
    return TiedGPT(GPTConfig())
