"""One rank of the tensor-parallel test: run by torchrun, once for a whole list of cases. Arguments: folder."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from hashtrain import Hasher
from sparse_decode import Budget, HashSelector, LshSelector, OracleSelector, QueryHeadHasher, attach
from sparse_decode_doubles import generate, prompts
from transformers import AutoModelForCausalLM

BUDGET = Budget(0.1, min_tokens=2, sink=1, recent=2)
WAYS = {"greedy": {}, "beam": {"num_beams": 2}}
FAMILIES = ("qwen3", "gpt_oss")  # heads split over ranks; attention whole on every rank


def cases(folder, model):
    """Every selector, by name."""
    hasher = Hasher.from_pretrained(folder / f"{model.config.model_type}-hasher")
    return {
        "planes": HashSelector(hasher),
        "planes per query head": HashSelector(QueryHeadHasher(hasher)),
        "planes, budgets by head": HashSelector(hasher),
        "lsh": LshSelector(model.config),
        "oracle": OracleSelector(),
    }


@torch.no_grad()
def results(folder, **options):
    """Generate with every case: tokens by family, selector and way; counts too."""
    torch.set_num_threads(1)
    ids, mask = prompts()
    found = {}
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(folder / family, **options).eval()
        for name, selector in cases(folder, model).items():
            by_head = name.endswith("by head")
            with attach(model, selector, replace(BUDGET, by_head=by_head)) as attachment:
                assert attachment.remainder == name.startswith("planes")
                for way, settings in WAYS.items():
                    found[f"{family}, {name}, {way}"] = generate(model, ids, mask, new_tokens=4, **settings).tolist()
                if not by_head:  # ranks differ in it
                    found[f"{family}, {name}, density"] = attachment.density()[3]
    return found


if __name__ == "__main__":
    import json

    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    folder = Path(sys.argv[1])
    found = results(folder, distributed_config=DistributedConfig(tp_size=2))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
