"""What tools/mutation.py changes, which tests should notice, and the changes that no test could detect."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A module, the functions to change (all, if none is named), and the tests that should notice.

    Attributes:
        leave: tests to exclude with pytest's -k, because they are slow and unrelated to these functions.
        warm: modules to import before the fork, because they are slow to import and not changed.
        compiles: whether machine code depends on the module, so that a mutant must not reuse stored code.
        count: default number of mutants.
        suffix: the end of the module's file name; a package's is "/__init__.py".
    """

    module: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()
    compiles: bool = False
    count: int = 60
    suffix: str = ".py"

    @property
    def package(self) -> str:
        """Import name of the module's package."""
        return self.module.partition(".")[0]

    @property
    def file(self) -> str:
        """Path of the module's file, from the root of the repository."""
        return f"packages/{self.package.replace('_', '-')}/src/{self.module.replace('.', '/')}{self.suffix}"


TOPK, SEARCH = "packages/hashcore/tests/test_topk.py", "packages/hashcore/tests/test_search.py"
PAGES = "packages/hashcore/tests/test_pages.py"
REFUSALS, INTO = "packages/hashcore/tests/test_arguments.py", "packages/hashcore/tests/test_out.py"
PLAN = "packages/hashcore/tests/test_plan.py"
PREPARED, BUFFER = "packages/hashcore/tests/test_prepared.py", "packages/sparse-decode/tests/test_buffer.py"
CACHE = ("packages/sparse-decode/tests/test_cache.py", "packages/sparse-decode/tests/test_cache_codes.py")
SLOW = ("every_integer_dtype", "inputs_are_not_modified", "imports_no_torch", "threads_may_call")
MODELS = ("torch", "transformers.cache_utils", "hashtrain", "hashcore.cpu")
TARGETS = {
    "reference": Target("hashcore.reference", (TOPK,), ("eligible", "topk"), SLOW),
    "topk kernel": Target(
        "hashcore.cpu.select_kernels",
        (TOPK, SEARCH),
        (
            *("topk_tasks", "_threshold", "_count", "_walk", "_compact"),
            *("_append", "_take", "_shrink", "_write", "_sort"),
        ),
        SLOW,
        compiles=True,
    ),
    "search kernel": Target(
        "hashcore.cpu.search_kernels",
        (SEARCH,),
        ("search_tasks", "merge_tasks", "_misled"),
        SLOW,
        compiles=True,
        count=24,  # each takes ten seconds to compile
    ),
    "collect kernel": Target(
        "hashcore.cpu.collect_kernels", (SEARCH,), ("_collect", "_same"), SLOW, compiles=True, count=12
    ),
    "cpu": Target(
        "hashcore.cpu",
        (PLAN, TOPK, SEARCH, INTO, PREPARED, PAGES),
        ("topk", "_topk", "search", "plain_search", "run_search", "_search_whole", "_search_parts"),
        SLOW,
        suffix="/__init__.py",
    ),
    "plan": Target("hashcore.cpu.launch_plan", (PLAN, SEARCH, PREPARED), ("search", "filled", "_common"), SLOW),
    "host": Target("hashcore.ops", (TOPK, REFUSALS, SEARCH, INTO, PREPARED, PAGES), ("topk", "search"), SLOW),
    "validation": Target(
        "hashcore.validation",
        (TOPK, REFUSALS, SEARCH, INTO, PREPARED),
        (
            *("integer_scores", "row_bounds", "bounds", "_eligible", "score_bits"),
            *("outputs", "_per_row", "_ordered"),
        ),
        SLOW,
    ),
    "arguments": Target(
        "hashcore.arguments",
        (TOPK, REFUSALS, SEARCH, INTO, PREPARED),
        ("order", "pair", "position", "natural", "integers", "are_plain_weights", "row_integers"),
        SLOW,
        count=30,
    ),
    "buffer": Target("sparse_decode.caches.buffer", (BUFFER, *CACHE), warm=MODELS),
    "cache": Target("sparse_decode.caches.cache", CACHE, warm=MODELS),
    "cache types": Target("sparse_decode.caches.cache_types", CACHE, warm=MODELS, count=20),
}
_SEARCH, _COLLECT, _SELECT = (f"hashcore/cpu/{name}_kernels.py" for name in ("search", "collect", "select"))
_CPU = "hashcore/cpu/__init__.py"
_BUFFER, _CACHE, _TYPES = (f"sparse_decode/caches/{name}.py" for name in ("buffer", "cache", "cache_types"))
_SEEN = "seen |= state[r + same, FROM] < high and state[r + same, TO] > low"
_SORT = "_sort(kept[:count], wanted, max(floor - 1, 0), top, histogram, scores, indices)"
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (_SELECT, "histogram[: 4 * bins] = 0", "4 -> 5"): "it clears unused bins",
    (_SELECT, "whole = len(s) // 4 * 4", "4 -> 5"): "tokens outside blocks of four are counted one at a time",
    **dict.fromkeys(
        [
            *((_COLLECT, _SEEN, change) for change in ("< -> <=", "> -> >=", "and -> or")),
            (_COLLECT, "if seen and not pairs:", "and -> or"),
        ],
        "it only computes more scores than are used",
    ),
    (_SELECT, "mask &= mask - np.uint64(1)", "1 -> 2"): "the first four bits are cleared by then, bit 0 with them",
    **dict.fromkeys(
        [(kernels, "stay_a_function()", "removed") for kernels in (_SEARCH, _COLLECT, _SELECT)],
        "it affects compilation, not results",
    ),
    (_SELECT, _SORT, "1 -> 2"): "a bin below the floor is empty",
    (_COLLECT, "if count + size + MORE > len(kept):", "> -> >="): "results do not depend on when it shrinks",
    (_SELECT, "return 0", "return None"): "only the return value of topk_tasks is used",
    (_SELECT, "return 0", "0 -> 1"): "the same",
    (_SELECT, "if count > wanted:", "> -> >="): "selecting `wanted` of `wanted` entries keeps them all",
    (_SELECT, "bins = top - base + 1", "1 -> 2"): "the bin above the top is empty",
    (_SELECT, "bins = top - base + 1", "- -> +"): "the bins above the top are empty",
    (_SELECT, "if bins <= LEVEL:", "<= -> <"): "both ways count the same",
    (_SELECT, "if best and wanted > 0:", "0 -> 1"): "a single entry has no order",
    (
        _SELECT,
        "place, end, last = np.int64(0), wanted - 1, np.uint64(0)",
        "0 -> 1 #2",
    ): "the entry of the last slot is always found",
    (
        _CPU,
        "threads.run(select_kernels.topk_tasks, count, threads.count(4 * scores.size), passed)",
        "4 -> 5",
    ): "the result does not depend on the threads",
    (
        _CPU,
        "threads.run(search_kernels.merge_tasks, len(scores), 1, (*found, k, top, best, scores, indices))",
        "1 -> 2",
    ): "the result does not depend on the threads",
    (_CPU, "rows = -1, made.shape[-1]", "1 -> 2"): "numpy takes -2 as it takes -1",
    (_CPU, "query = arguments.aligned(query)", "removed"): "x86-64 reads unaligned words, too",
    (_BUFFER, "self._own = True", "removed"): "it is read only where rows exist, and they set it",
    (_BUFFER, "self._own = True", "True -> False"): "the same",
    (_CACHE, "super().reset()", "removed"): "the preceding lines empty a dynamic layer",
    (_CACHE, "self.is_initialized = False", "removed"): "transformers 5.21 and later sets it, too",
    (_CACHE, "memo[id(self)] = twin", "removed"): "deepcopy records the twin, too; no layer contains itself",
    (
        _TYPES,
        "keys = torch.cat([self._apply_pending_reorder(keys, keys)[0], cast(Tensor, self.keys)], dim=-2)",
        "0 -> 1",
    ): "both entries have the same keys",
    (_CACHE, "raise NotImplementedError", "removed"): "every instantiated class overrides it",
    (_CACHE, "if keys is not None and values is not None:", "and -> or"): "they are set together",
    (_CACHE, "if self._codes is not None and self.moments is not None:", "and -> or"): "they are set together",
}
"""(file below src, line, change): why the mutant is equivalent to the original."""
