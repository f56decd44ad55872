"""Models of the shapes and names of other libraries' models, without these libraries."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """transformers.pytorch_utils.Conv1D: a linear map whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Attention(nn.Module):
    """One fused projection; by head_dim it says how many heads there are."""

    def __init__(self, width: int, conv: bool, head_dim: int = 4) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.c_attn: nn.Module = Conv1D(3 * width, width) if conv else nn.Linear(width, 3 * width)
        self.c_proj: nn.Module = Conv1D(width, width) if conv else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj((q @ k.mT).softmax(-1) @ v)


class MLP(nn.Module):
    def __init__(self, width: int, conv: bool) -> None:
        super().__init__()
        self.c_fc: nn.Module = Conv1D(2 * width, width) if conv else nn.Linear(width, 2 * width)
        self.c_proj: nn.Module = Conv1D(width, 2 * width) if conv else nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(torch.tanh(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, conv: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, conv), MLP(width, conv)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The names and shapes of GPT-2 in transformers (conv), or of its ports to nn.Linear; the head is tied."""

    def __init__(self, conv: bool = True, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(6, width),
                "h": nn.ModuleList(Block(width, conv) for _ in range(2)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        t = self.transformer
        x = t["wte"](tokens) + t["wpe"](torch.arange(tokens.shape[-1]))
        for block in t["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.lm_head(t["ln_f"](x))


class Experts(nn.Module):
    """Fused experts, as transformers has them: (experts, out, in), or the other way round."""

    def __init__(self, count: int, hidden: int, inner: int, turned: bool, says: bool = True) -> None:
        super().__init__()
        up, down = (2 * inner, hidden), (hidden, inner)
        self.gate_up_proj = nn.Parameter(torch.randn(count, *(up[::-1] if turned else up)) * 0.2)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.randn(count, *(down[::-1] if turned else down)) * 0.2)
        if says:
            self.is_transposed = turned
        self.turned = turned

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        up, down = self.gate_up_proj, self.down_proj
        if not self.turned:
            up, down = up.mT, down.mT
        gate, value = (x[None] @ up + self.gate_up_proj_bias[:, None]).chunk(2, -1)
        return (weights.mT[..., None] * ((gate.sigmoid() * value) @ down)).sum(0)


class TopKRouter(nn.Module):
    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.mT).softmax(-1)


class Mixture(nn.Module):
    """The names and shapes of a mixture of experts in transformers."""

    def __init__(self, turned: bool = False, says: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.mlp = nn.ModuleDict({"gate": TopKRouter(3, 8), "experts": Experts(3, 8, 6, turned, says)})
        self.norm = nn.RMSNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens).reshape(-1, 8)
        x = x + self.mlp["experts"](x, self.mlp["gate"](x))
        return self.lm_head(self.norm(x)).view(*tokens.shape, 11)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter and a magnitude, named as PEFT names them."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False)})
        self.lora_magnitude_vector = nn.ParameterDict({"default": nn.Parameter(torch.ones(1, width))})
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(rank, 11))})


class LoRALinear(nn.Module):
    """An adapter whose factors are parameters of the layer, as loralib has them."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(rank, width))
        self.lora_B = nn.Parameter(torch.zeros(width, rank))
        self.magnitude = nn.Parameter(torch.ones(width))
