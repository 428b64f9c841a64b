"""What benchmarks count: the parts of a step."""

import torch
from sparse_decode import Budget, attach


def test_the_parts_of_a_step_contain_one_another(benchmark):
    module = benchmark("host_share")
    model = benchmark("shapes").smollm2(2)
    own = torch.nn.Linear.forward
    with attach(model, benchmark("shapes").make_hasher(model), Budget()):
        found = module.measure(model, 300, 3)
    assert 0 < found["kernel"] < found["fused"] < found["attention"] < found["step"]
    assert found["products"] > 0
    assert found["host"] < found["step"] - found["kernel"]
    assert torch.nn.Linear.forward is own
