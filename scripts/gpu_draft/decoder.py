"""The target in passes of one fixed shape: every step of all rows is the same kernels on the same
memory, so that on a GPU a step is one captured graph and the CPU has nothing to do.

It is the target's own model; only its attention is another one than the engine's (bridge.py lets a
plan decide that), over a cache whose rows all have their own length, read whole behind a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flashdraft import bridge
from flashdraft.target import Target
from flashdraft.types import FlashdraftError


class StaticPlan:
    """Stands in for attention.AttentionPlan: a prefill of some rows, or one token of every row.

    The last row of the store is nobody's: passes with fewer prompts than they have room for write there.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._prefill_rows: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def prefill(self, rows: torch.Tensor) -> None:
        """The next passes write prompts from slot 0 on."""
        self._prefill_rows = rows

    def decode(self, positions: torch.Tensor, dtype: torch.dtype) -> None:
        """The next pass writes a token of every row at its position, and sees what is before it."""
        self._prefill_rows, self._positions = None, positions
        unseen = torch.arange(self.slots, device=positions.device) > positions[:, None]
        self._mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        causal: bool = True, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As AttentionPlan.attend: q [B, heads, T, d] -> [B, T, heads, d]."""
        if window is not None or softcap is not None or sinks is not None or not causal:
            raise FlashdraftError(
                "this target's attention has windows, soft caps or sinks, which are not written here."
            )
        if layer not in self._layers:
            shape = (self.rows + 1, k.shape[1], self.slots, k.shape[3])
            self._layers[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        keys, values = self._layers[layer]
        if self._prefill_rows is not None:
            keys[self._prefill_rows, :, : k.shape[2]] = k
            values[self._prefill_rows, :, : k.shape[2]] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return out.transpose(1, 2)
        assert self._positions is not None and self._mask is not None
        rows = torch.arange(self.rows, device=q.device)
        keys[rows, :, self._positions] = k[:, :, 0]
        values[rows, :, self._positions] = v[:, :, 0]
        batch, heads, _, dim = q.shape
        folded = q.view(batch, k.shape[1], heads // k.shape[1], dim)
        mask = self._mask[:, None, None].expand(-1, 1, folded.shape[2], -1)
        out = F.scaled_dot_product_attention(
            folded, keys[: self.rows], values[: self.rows], attn_mask=mask, scale=scale
        )
        return out.view(batch, heads, 1, -1).transpose(1, 2)


class StaticDecoder:
    """Rows that decode on their own until they end; whoever drives it looks at them now and then.

    Args:
        rows: B. slots: longest prompt and answer together. max_new: longest answer.
        graph: capture the step (CUDA); else it runs as it is written.

    Attributes:
        active: [B], still going. count: [B], tokens of the answer so far. answers: [B, max_new + 1], the
        last column is nobody's.
    """

    def __init__(self, target: Target, rows: int, slots: int, max_new: int, *, graph: bool | None = None) -> None:
        device = target.device
        self.target, self.rows, self.max_new = target, rows, max_new
        self._plan = StaticPlan(rows, -(-slots // 64) * 64)
        self._eos = torch.tensor(sorted(target.eos_ids) or [-1], device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.count, self._token, self._position, self._limit = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._temperature = torch.zeros(rows, device=device)
        self.answers = torch.zeros(rows, max_new + 1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None
        if graph if graph is not None else device.type == "cuda":
            try:
                self._capture()
            except RuntimeError as error:
                print(f"the step cannot be captured ({str(error)[:300]}); decoding goes on without", flush=True)

    @torch.inference_mode()
    def admit(
        self, prompts: list[list[int]], rows: list[int], limits: list[int], temperatures: list[float], room: int = 0
    ) -> torch.Tensor:
        """Start prompts in free rows: one pass, and the first token of each. Returns the logits it was
        drawn from [N, V].

        room: prompts the pass has room for, so that shapes repeat.
        """
        device = self.target.device
        count = max(room, len(prompts))
        width = -(-max(map(len, prompts)) // 64) * 64
        ids = torch.zeros(count, width, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        where = torch.tensor([*rows, *[self.rows] * (count - len(rows))], device=device)
        self._plan.prefill(where)
        positions = torch.arange(width, device=device).expand(count, -1)
        with bridge.running(self._plan, self.target.windows):  # type: ignore[arg-type]
            hidden = self.target.model.base_model(
                input_ids=ids.to(device), position_ids=positions, use_cache=False
            ).last_hidden_state
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        logits = self.target.head(hidden[torch.arange(len(prompts), device=device), lengths - 1])
        at = where[: len(prompts)]
        self._temperature[at] = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._limit[at] = torch.tensor(limits, device=device).clamp(max=self.max_new)
        token = self._choose(logits, self._temperature[at])
        self._token[at], self._position[at], self.count[at] = token, lengths, 1
        self.answers[at, 0] = token
        self.active[at] = ~self._ends(token) & (self._limit[at] > 1)
        return logits

    @torch.inference_mode()
    def steps(self, number: int) -> None:
        """That many tokens for every active row."""
        for _ in range(number):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()

    def _step(self) -> None:
        self._plan.decode(self._position, self.target.dtype)
        with bridge.running(self._plan, self.target.windows):  # type: ignore[arg-type]
            out = self.target.model(
                input_ids=self._token[:, None], position_ids=self._position[:, None], use_cache=False
            )
        self.logits = out.logits[:, -1]
        token = torch.where(self.active, self._choose(self.logits, self._temperature), self._token)
        # no where() with a number: it would be copied from the CPU, which a graph cannot capture
        column = self.count * self.active + self.max_new * ~self.active
        self.answers.scatter_(1, column[:, None], token[:, None])
        self._token.copy_(token)
        self.count += self.active
        self._position += self.active
        self.active &= ~self._ends(token) & (self.count < self._limit)

    def _ends(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens[:, None] == self._eos).any(-1)

    def _choose(self, logits_NV: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """argmax(logits + T * Gumbel noise): a draw from softmax(logits / T), and the argmax for T = 0."""
        scores = logits_NV.float()
        noise = torch.empty_like(scores).exponential_().clamp_(min=1e-30).log_().neg_()
        scores = scores + temperatures[:, None] * noise
        if self.target.num_tokens < scores.shape[-1]:
            scores[:, self.target.num_tokens :] = -torch.inf
        return scores.argmax(-1)

    @torch.inference_mode()
    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate at first use, which a graph may not
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph


def check(target: Target, prompt: list[int], steps: int = 8) -> float:
    """Decode a few tokens here, then have the target's own path read them: the largest difference of
    the logits, over the largest logit. Raises FlashdraftError if they are not the same model."""
    decoder = StaticDecoder(target, 2, len(prompt) + steps + 2, steps + 1, graph=False)
    first = decoder.admit([prompt, prompt[: len(prompt) // 2 + 1]], [1, 0], [steps + 1] * 2, [0.0, 0.0], room=3)
    decoder.active[:] = True  # ends do not matter here
    decoder.steps(steps - 1)
    answer = decoder.answers[1, : steps - 1].tolist()
    tokens = torch.tensor([[*prompt, *answer]], device=target.device)
    cache = target.new_cache(1, tokens.shape[1])
    expected = target.forward(tokens, cache, [0]).logits_BTV[0].float()
    assert decoder.logits is not None
    pairs = ((first[0], expected[len(prompt) - 1]), (decoder.logits[1], expected[-1]))
    worst = max(float((found.float() - right).abs().max() / right.abs().max()) for found, right in pairs)
    limit = 0.06 if target.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not worst < limit:
        raise FlashdraftError(f"decoding in fixed shapes differs from {target.name}'s own passes by {worst:.3g}.")
    return worst
