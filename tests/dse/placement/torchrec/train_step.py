"""One rank of a job that an exported plan shards, on one CPU; run as `train_step.py PLAN RANK WORLD STORE`.

Each rank checks its shards after one step against the same step of the whole model. Imports nothing of the project.
"""

import importlib.util
import os
import sys
from pathlib import Path

RATE = 0.1


def main(plan_path, rank, world, store):
    for key, value in {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
    }.items():
        os.environ[key] = str(value)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world)
    plan = load(plan_path)
    model, whole = build(plan), build(plan)
    sharded = shard(model, plan)
    copy_in(sharded, whole)
    optimizer = torch.optim.SGD([p for n, p in sharded.named_parameters() if replicated(plan, n)], lr=RATE)
    batches = [batch(plan, r) for r in range(world)]
    sharded(batches[rank]).backward()
    optimizer.step()
    reference_step(whole, batches)
    print("checked", check(sharded, whole))  # noqa: T201 - the parent reads it
    distributed.destroy_process_group()
    assert not {"dse", "perfcore"} & set(sys.modules)


def load(path):
    spec = importlib.util.spec_from_file_location("plan", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(plan):
    import torch
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name,
                        feature_names=[f"feature_{name}"],
                        num_embeddings=table["rows"],
                        embedding_dim=table["columns"],
                    )
                    for name, table in plan.TABLES.items()
                ],
                device=torch.device("cpu"),
            )

        def forward(self, features):
            return (self.sparse(features).values() ** 2).sum(dim=1).mean()

    torch.manual_seed(0)
    return Model()


def shard(model, plan):
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    return DistributedModelParallel(
        module=model,
        device=torch.device("cpu"),
        plan=plan.sharding_plan(model, compute_device="cpu"),
        sharders=[EmbeddingBagCollectionSharder(fused_params={"learning_rate": RATE})],
    )


def replicated(plan, parameter):
    return plan.TABLES[parameter.split(".")[-2]]["type"] == "data_parallel"


def batch(plan, rank):
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(rank)
    samples, bag = 4, 2
    rows = [t["rows"] for t in plan.TABLES.values()]
    ids = torch.cat([torch.randint(n, (samples * bag,), generator=generator) for n in rows])
    lengths = torch.full((samples * len(rows),), bag)
    return KeyedJaggedTensor(keys=[f"feature_{n}" for n in plan.TABLES], values=ids, lengths=lengths)


def reference_step(model, batches):
    import torch

    torch.stack([model(b) for b in batches]).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad


def copy_in(sharded, whole):
    """Sharding draws weights anew: give each shard its part of the whole model."""
    for part, wanted in pairs(sharded, whole):
        part.copy_(wanted)


def check(sharded, whole):
    """Compare every local shard with its part of the whole model; give the number of values compared."""
    import torch

    compared = 0
    for found, wanted in pairs(sharded, whole):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        compared += found.numel()
    return compared


def pairs(sharded, whole):
    expected = whole.state_dict()
    for name, value in sharded.state_dict().items():
        if not hasattr(value, "local_shards"):
            yield value, expected[name.replace("module.", "")]
            continue
        for part in value.local_shards():
            offsets, sizes = part.metadata.shard_offsets, part.metadata.shard_sizes
            yield part.tensor, crop(expected[name], offsets, sizes)


def crop(tensor, offsets, sizes):
    return tensor[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
