"""Would the suite notice? Each bug is planted in a copy of the package, and a test must fail.

A bug is one exact replacement in one file. The copy is imported instead of the real package by a
pytest run of its own, in a fork of a process that has torch loaded, so nothing here can leak into other tests.
Exit code 1 is "tests failed"; a copy that does not even import (2 and up) proves nothing and counts as a broken bug.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "flashdraft"
LOSSLESS = "test_lossless.py"
# The part of the losslessness test that sees most faults: accepted and refused drafts, ragged rows.
FAST = "dflash-greedy-llama-float64"
TREES = "test_trees.py"
METHODS = "test_training_methods.py"


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    tests: str = LOSSLESS
    select: str = FAST


BUGS = [
    Bug(
        "bonus token off by one",
        "verify.py",
        "return Verdict(tuple(path), own_tokens[len(path)])",
        "return Verdict(tuple(path), own_tokens[max(len(path) - 1, 0)])",
    ),
    Bug(
        "one refused token is kept",
        "verify.py",
        "while len(path) < len(draft) and draft[len(path)] == own_tokens[len(path)]:",
        "while len(path) < len(draft) and (not path or draft[len(path)] == own_tokens[len(path)]):",
    ),
    Bug(
        "stale cache: the whole block stays",
        "session.py",
        "self.cache.keep(row, first + in_place)",
        "self.cache.keep(row, first + len(self._blocks[row]))",
    ),
    Bug(
        "no residual after a refusal",
        "verify.py",
        "rest = (p - draft_probs_V.double()).clamp_(min=0)",
        "rest = p.clone()",
        "test_verify.py",
        "",
    ),
    Bug(
        "acceptance without the draft's probability",
        "verify.py",
        "if not accept_uniforms[n] * q < p:",
        "if not accept_uniforms[n] < p:",
        "test_verify.py",
        "",
    ),
    Bug(
        "positions shifted in a verify pass",
        "attention.py",
        "return starts[:, None] + torch.arange(self.num_tokens, dtype=torch.int64, device=device)",
        "return starts[:, None] + (self.num_tokens > 1) + torch.arange(self.num_tokens, device=device)",
    ),
    Bug(
        "all rows are at the first row's position",
        "attention.py",
        "self.starts = [cache.lengths[row] for row in rows]",
        "self.starts = [cache.lengths[rows[0]] for row in rows]",
    ),
    Bug(
        "end of text inside a block is ignored",
        "engine.py",
        "if token in answer.stop_ids:",
        "if token in answer.stop_ids and count % 3:",
        "test_faults_decoding.py",
        "",
    ),
    Bug(
        "penalties count rejected tokens",
        "session.py",
        "            sampler.commit(tokens)\n",
        "            sampler.commit([*tokens, *self._blocks[row][len(tokens) :]])\n",
        LOSSLESS,
        "dflash-penalties-llama-float64",
    ),
    Bug(
        "penalties do not see the draft before a slot",
        "sampling.py",
        "counts[t + 1 :, token] += 1",
        "pass",
        LOSSLESS,
        "dflash-penalties-llama-float64",
    ),
    Bug(
        "noise of a position is used again",
        "sampling.py",
        "return _mix((key + _GOLDEN * (position + 1)) & _MASK64)",
        "return _mix((key + _GOLDEN * (position // 2 + 1)) & _MASK64)",
        "test_sampling.py",
        "",
    ),
    Bug(
        "noise depends on the slot, not on the position",
        "sampling.py",
        "scores[t] += self.noise(self.next_position + ahead)",
        "scores[t] += self.noise(ahead)",
        LOSSLESS,
        "dflash-coupled-llama-float64",
    ),
    Bug(
        "wrong layer tapped",
        "target.py",
        "self.layers[i].register_forward_hook(hook(i))",
        "self.layers[i - 1].register_forward_hook(hook(i))",
        "test_targets.py",
        "feature or tap",
    ),
    Bug(
        "a token sees the one after it",
        "attention.py",
        "seen = seen & (slot <= query)",
        "seen = seen & (slot <= query + 1)",
    ),
    Bug(
        "windows are ignored",
        "attention.py",
        "seen = seen & (query - slot < window) & (slot - query < window)",
        "pass",
        "test_attention.py",
        "",
    ),
    Bug(
        "padding of a shorter draft is seen",
        "attention.py",
        "seen = slot < starts + valid",
        "seen = slot < starts + self.num_tokens",
        "test_dflash.py",
        "",
    ),
    Bug(
        "tapping the last layer is allowed",
        "checkpoint.py",
        "    if last in ids:\n",
        "    if last in ids and False:\n",
        "test_checkpoint.py",
        "",
    ),
    Bug(
        "the draft's own block stays in its cache",
        "drafters/dflash.py",
        "        logits[..., self._num_tokens :] = -torch.inf\n",
        "        logits[..., self._num_tokens :] = -torch.inf\n"
        "        for row, length in zip(rows, lengths, strict=True):\n"
        "            state.cache.keep(row, length + 1)\n",
        "test_dflash.py",
        "",
    ),
    Bug(
        "context features one position late",
        "drafters/dflash.py",
        "torch.arange(state.cache.lengths[row], state.cache.lengths[row] + count)",
        "torch.arange(state.cache.lengths[row], state.cache.lengths[row] + count) + 1",
        "test_parity.py test_dflash.py",
        "",
    ),
    Bug(
        "minimum length holds for the first slot only",
        "sampling.py",
        "for t in range(min(len(scores), self.params.min_tokens - self.num_generated)):",
        "for t in range(min(1, self.params.min_tokens - self.num_generated)):",
        "test_sampling.py test_faults_decoding.py",
        "",
    ),
    Bug(
        "the nucleus loses its last token",
        "sampling.py",
        "last = int((mass < p).sum().clamp(max=row.shape[0] - 1))",
        "last = int((mass < p).sum().sub(1).clamp(min=0))",
        "test_sampling.py",
        "",
    ),
    Bug(
        "a reused prefix is one token too long",
        "engine.py",
        "limit = min(len(stale) - 1, len(prompt) - 1)",
        "limit = min(len(stale), len(prompt) - 1)",
        "test_engine.py",
        "",
    ),
    Bug(
        "stop strings are not held back",
        "text.py",
        "keep = max((_overlap(pending, stop) for stop in self._stop), default=0)",
        "keep = 0",
        "test_text.py",
        "",
    ),
    Bug(
        "logprobs after temperature",
        "engine.py",
        "logprobs = logits_V.float().log_softmax(-1)",
        "logprobs = (logits_V.float() / 0.7).log_softmax(-1)",
        "test_faults_decoding.py test_faults_text.py",
        "logprob",
    ),
    Bug(
        "a sibling is seen in the tree",
        "tree.py",
        "            mask[node + 1] |= mask[parent + 1]\n",
        "            mask[node + 1] |= mask[parent + 1]\n"
        "            mask[node + 1, [n + 1 for n in range(node) if parents[n] == parent]] = True\n",
        TREES,
        "equals_plain and greedy-llama-float64",
    ),
    Bug(
        "tree positions by slot instead of depth",
        "attention.py",
        "self._tree[0][:, self.num_before :].to(device)",
        "torch.arange(self.num_tokens, device=device) + self.num_before",
        TREES,
        "equals_plain and greedy-llama-float64",
    ),
    Bug(
        "entries of a branch stay where they are",
        "session.py",
        "next((i for i, slot in enumerate(slots) if slot != i), len(slots))",
        "len(slots)",
        TREES,
        "path_is_kept or equals_plain and greedy-llama-float64",
    ),
    Bug(
        "what is read again is forgotten to be read",
        "session.py",
        "self._num_unread[row] = len(slots) - in_place",
        "self._num_unread[row] = 0",
        TREES,
        "path_is_kept or equals_plain and greedy-llama-float64",
    ),
    Bug(
        "features of a tree by place, not by path",
        "session.py",
        "if in_place == len(slots) else [first + slot for slot in slots]",
        "",
        TREES,
        "path_is_kept",
    ),
    Bug(
        "a near-tie on a branch is decided there",
        "verify.py",
        "if child is None or not reliable(child):",
        "if child is None:",
        TREES,
        "near_tie",
    ),
    Bug(
        "a prompt is reused beyond the cache",
        "engine.py",
        "self.session.tokens[row][: self.session.num_cached(row) + 1]",
        "self.session.tokens[row]",
        TREES,
        "prompt_that_ends",
    ),
    Bug(
        "siblings have a noise of their own",
        "sampling.py",
        "enumerate(range(len(scores)) if paths is None else map(len, paths)):\n                scores[t] +=",
        "enumerate(range(len(scores))):\n                scores[t] +=",
        TREES,
        "siblings or d14",
    ),
    Bug(
        "Medusa: heads one off",
        "drafters/medusa.py",
        "read = self.states(states, num_heads).unbind(-2)",
        "read = self.states(states, num_heads).roll(1, -2).unbind(-2)",
        "test_rivals.py",
        "medusa_chain",
    ),
    Bug(
        "Medusa: the state before the final norm",
        "drafters/medusa.py",
        "(target.num_layers,) if self.depth else ()",
        "(target.num_layers - 1,) if self.depth else ()",
        "test_rivals.py",
        "medusa_chain",
    ),
    Bug(
        "EAGLE-3: features off by one",
        "drafters/eagle3.py",
        "parts = torch.split(self.network.fuse(commit.features_CF), [",
        "parts = torch.split(self.network.fuse(commit.features_CF).roll(1, 0), [",
        "test_rivals.py",
        "eagle_chain",
    ),
    Bug(
        "EAGLE-2: nodes are ranked by their own probability",
        "drafters/dynamic_tree.py",
        "self.scores.append(so_far + value)",
        "self.scores.append(value + 0 * so_far)",
        "test_rivals.py",
        "eagle_tree",
    ),
    Bug(
        "EAGLE-3: the first pair of a reused prefix is the old one",
        "drafters/eagle3.py",
        "state.again[row] = (token, fused)",
        "pass",
        "test_rivals.py",
        "reused_prefix and eagle3",
    ),
    Bug(
        "draft model: refused tokens stay in its cache",
        "drafters/draft_model.py",
        "while kept < min(len(fed), len(tokens)) and fed[kept] == tokens[kept]:",
        "while kept < min(len(fed), len(tokens)):",
        "test_rivals.py",
        "continues_the_text",
    ),
    Bug(
        "the least confident slots first",
        "drafters/dflash.py",
        "masked.sort(key=lambda n: -sure[n][0])",
        "masked.sort(key=lambda n: sure[n][0])",
        "test_rivals.py",
        "more_passes",
    ),
    Bug(
        "the anchor's feature is forgotten",
        "drafters/dflash_ablations.py",
        "state.cache.lengths[row]] for row in rows])",
        "state.cache.lengths[row] - 1] for row in rows])",
        "test_rivals.py",
        "own_context",
    ),
    Bug(
        "Medusa is trained one token late",
        "training/methods/medusa.py",
        "view(-1, blocks.blocks_per_piece) - 1  # it",
        "view(-1, blocks.blocks_per_piece)  # it",
        METHODS,
        "plain_loop and medusa",
    ),
    Bug(
        "EAGLE-3 is trained on pairs of token and feature of one place",
        "training/methods/eagle3.py",
        "method.tokens(i, end + 1)[1:]",
        "method.tokens(i, end)",
        METHODS,
        "plain_loop and eagle3",
    ),
    Bug(
        "EAGLE-3: no training-time test, every step has the target's feature",
        "training/methods/eagle3.py",
        "            hidden = self.network(self.target.embed(tokens[:, slot, None]), hidden, positions, unroll.attend)\n"
        "            states.append(hidden)\n",
        "            states.append(self.network(self.target.embed(tokens[:, slot, None]), hidden, positions, unroll.attend))\n",
        METHODS,
        "plain_loop and eagle3",
    ),
    Bug(
        "a draft model is trained with the label in its context",
        "training/methods/draft_model.py",
        "torch.cat([read[i][at] for",
        "torch.cat([read[i][(at + 1).clamp(max=len(read[i]) - 1)] for",
        METHODS,
        "plain_loop and draft_model",
    ),
    Bug(
        "filled slots keep their labels",
        "training/methods/dflash.py",
        "labels_AL=torch.where(given, -1, labels)",
        "labels_AL=labels",
        METHODS,
        "filled_slots",
    ),
    Bug(
        "no features: the target's states leak in",
        "training/methods/dflash.py",
        "        if fused is not None:\n            embeds = embeds + fused[:end]\n",
        "        ids, cache = self.tokens(sequence, end)[None], self.target.new_cache(1, end)\n"
        "        embeds = embeds + self.target.forward(ids, cache, [0], layer_ids=(1,)).features_BTF.clone()\n",
        METHODS,
        "plain_loop and features",
    ),
    Bug(
        "Medusa: a node of the static tree under its grandparent",
        "tree.py",
        "[index[path[:-1]] for",
        "[index[path[:-2] or path[:-1]] for",
        "test_rivals.py",
        "medusa_tree",
    ),
    Bug(
        "of a tree the first nodes are kept, not the path",
        "session.py",
        "slots = (0, *(node + 1 for node in verdict.path))",
        "slots = tuple(range(len(verdict.path) + 1))",
        TREES,
        "path_is_kept and llama",
    ),
    Bug(
        "DFlash: nodes of a tree are ranked by their own chance",
        "tree.py",
        "heapq.heappush(edge, (cost - logprobs[len(path)][0], (*path, 0)))",
        "heapq.heappush(edge, (-logprobs[len(path)][0], (*path, 0)))",
        "test_tree.py test_rivals.py",
        "best_first or dflash_tree",
    ),
    Bug(
        "DFlash: a tree of ids of the draft's own vocabulary",
        "drafters/dflash.py",
        "return self._vocab_ids[torch.tensor(tokens, dtype=torch.int64, device=self._device)].tolist(), logprobs",
        "return tokens, logprobs",
        "test_rivals.py",
        "dflash_tree",
    ),
    Bug(
        "the length limit counts the block",
        "engine.py",
        "if self._room(answer) <= 1:",
        "if self._room(answer) <= 2:",
        "test_faults_decoding.py",
        "",
    ),
]


def plant(bug: Bug, folder: Path) -> None:
    # compiled modules too: what is not changed need not be compiled again
    shutil.copytree(SOURCE, folder / "flashdraft")
    file = folder / "flashdraft" / bug.file
    text = file.read_text()
    assert text.count(bug.old) == 1, f"{bug.name}: the code to break is there {text.count(bug.old)} times"
    text = text.replace(bug.old, bug.new)
    if "self._blocks" in bug.new:  # a bug that needs to know the block of the round
        text = text.replace(
            "        proposals = []\n        for b, (sampler",
            "        self._blocks = {r: [0, *d] for r, d in zip(rows, drafted, strict=True)}\n"
            "        proposals = []\n        for b, (sampler",
        )
    file.write_text(text)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that runs pytest in forks of itself (fork_server.py)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(TESTS)!r}); import fork_server as s; s.main()"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=TESTS.parent, env=env) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_suite(server: subprocess.Popen[str], bug: Bug, package: Path) -> tuple[int, str]:
    """Exit code and output of the tests that a bug names, with the copy of the package."""
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(str(TESTS / n) for n in bug.tests.split())]
    arguments += ["-k", bug.select] if bug.select else []
    log = package / "log"
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps({"package": str(package), "arguments": arguments, "log": str(log)}) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline()), log.read_text(errors="replace")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_suite_notices(bug: Bug, tmp_path: Path, server: subprocess.Popen[str]) -> None:
    plant(bug, tmp_path)
    code, said = run_suite(server, bug, tmp_path)
    assert code == 1, f"{bug.name}: exit code {code}\n{said[-3000:]}"


def test_the_copy_is_what_runs(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    """Without a bug the same machinery passes: a failure above is the bug's."""
    bug = Bug("none", "verify.py", '"""Lossless acceptance', '"""Lossless acceptance', LOSSLESS, "none-greedy-llama")
    plant(bug, tmp_path)
    code, said = run_suite(server, bug, tmp_path)
    assert code == 0, said[-2000:]
