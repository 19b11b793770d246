"""Makes the manifests of large training jobs, without their data: what a planner and a validator see of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from ckptspec.format.layout import Axis, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import FlatGroup, Manifest, Member, ShardEntry, TensorEntry
from ckptspec.format.target import Target, of_manifest

STATE = ("master", "exp_avg", "exp_avg_sq")  # what AdamW in mixed precision keeps of a parameter, in float32
KINDS = {"dp": "data", "rep": "data", "edp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name below `model/`, its shape, how it is cut (a word), and its layer, None outside of them."""

    name: str
    shape: tuple[int, ...]
    cut: str
    layer: int | None = None


@dataclass(frozen=True)
class Transformer:
    """A decoder; the defaults are those of a dense model of 70B, and with `experts` the MLP is a mixture."""

    layers: int = 80
    width: int = 8192
    hidden: int = 28_672
    heads: int = 8192
    kv: int = 1024
    words: int = 128_256
    experts: int = 0

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters."""
        yield Parameter("embed.weight", (self.words, self.width), "rows", 0)
        for i in range(self.layers):
            yield from self._layer(i)
        yield Parameter("norm.weight", (self.width,), "norm", self.layers - 1)
        yield Parameter("head.weight", (self.words, self.width), "rows", self.layers - 1)

    def _layer(self, i: int) -> Iterator[Parameter]:
        at = f"layers.{i}"
        yield Parameter(f"{at}.norm1.weight", (self.width,), "norm", i)
        for name, rows in (("q", self.heads), ("k", self.kv), ("v", self.kv)):
            yield Parameter(f"{at}.attention.{name}.weight", (rows, self.width), "rows", i)
        yield Parameter(f"{at}.attention.o.weight", (self.width, self.heads), "columns", i)
        yield Parameter(f"{at}.norm2.weight", (self.width,), "norm", i)
        if self.experts:
            yield Parameter(f"{at}.router.weight", (self.experts, self.width), "router", i)
            for name, shape in (("gate", (self.hidden, self.width)), ("up", (self.hidden, self.width))):
                yield Parameter(f"{at}.experts.{name}", (self.experts, *shape), "experts", i)
            yield Parameter(f"{at}.experts.down", (self.experts, self.width, self.hidden), "experts", i)
            return
        for name in ("gate", "up"):
            yield Parameter(f"{at}.mlp.{name}.weight", (self.hidden, self.width), "rows", i)
        yield Parameter(f"{at}.mlp.down.weight", (self.width, self.hidden), "columns", i)


DENSE = Transformer()
MIXTURE = Transformer(layers=60, width=7168, hidden=2048, heads=8192, kv=1024, experts=384)

# How FSDP2 over dp and tensor parallelism over tp cut a parameter, and experts over ep, by the word of the parameter.
FSDP: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "rows": (("tp", "dp"), ()),
    "columns": (("dp",), ("tp",)),
    "norm": (("dp",),),
    "router": (("dp",), ()),
    "experts": (("ep",), ("edp",), ()),
}


def grid(sizes: Mapping[str, int]) -> Mesh:
    """Return the mesh of axes of these names and sizes, the first one outermost."""
    return Mesh(tuple(Axis(name, n, KINDS[name]) for name, n in sizes.items()))


@dataclass
class Job:
    """A training job: its model, the meshes it is on, and how it holds state; `manifest` is what it would save."""

    model: Transformer
    meshes: Mapping[str, Mesh]
    layouts: dict[str, Layout] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    groups: dict[str, FlatGroup] = field(default_factory=dict)

    def manifest(self) -> Manifest:
        """Return the manifest; digests and sizes of shards are made up."""
        world = self.meshes["main"].size
        size = {"bfloat16": 2, "float32": 4, "uint8": 1}
        total = sum(prod(t.shape or ()) * size[t.dtype] for t in self.tensors.values())
        share = total // world + (1 << 20)
        digest = "sha256:" + "0" * 64
        shards = (ShardEntry(r, f"rank-{r:05d}.shard", share + 4096 + 64, share, 4096, digest) for r in range(world))
        return Manifest(
            "5f0c6a1e9b7d4c3281f2a3b4c5d6e7f8",
            1000,
            world,
            run_id="scale",
            producer={"name": "ckptspec", "version": "0"},
            meshes=self.meshes,
            layouts=self.layouts,
            shards=tuple(shards),
            tensors=self.tensors,
            objects={"optimizer/param_groups": "same", "rng/python": "rank"},
            flat_groups=self.groups,
            digest=digest,
        )

    def target(self) -> Target:
        """Return what the job asks for when it starts again."""
        return of_manifest(self.manifest())

    def by_parameter(self, stages: int = 1) -> Job:
        """Let the job hold each parameter and each value of its optimizer as a tensor of its own, stages pinned."""
        for p in self.model.parameters():
            mesh = "experts" if p.cut == "experts" else "main"
            stage = (p.layer or 0) * stages // self.model.layers
            at = {"pp": stage} if stages > 1 else {}
            layout = p.cut + (f".pp{stage}" if stages > 1 else "")
            self.layouts.setdefault(layout, MeshLayout(mesh, FSDP[p.cut], at))
            self.tensors[f"model/{p.name}"] = TensorEntry("bfloat16", p.shape, layout, "parameter")
            for kind in STATE:
                self.tensors[f"optimizer/state/{p.name}/{kind}"] = TensorEntry("float32", p.shape, layout, "optimizer")
        self._generator()
        return self

    def zero(self) -> Job:
        """Let the job hold parameters by tp alone, and optimizer state in one flat buffer for each index of tp."""
        cuts = {"rows": (("tp",), ()), "columns": ((), ("tp",)), "norm": ((),)}
        ways = self.meshes["main"].axis("tp").size
        for p in self.model.parameters():
            self.layouts.setdefault(p.cut, MeshLayout("main", cuts[p.cut]))
            self.tensors[f"model/{p.name}"] = TensorEntry("bfloat16", p.shape, p.cut, "parameter")
        for i in range(ways):
            members = tuple(self._members(i, ways))
            numel = members[-1].offset + prod(members[-1].shape)
            flats = {kind: f"optimizer/zero.tp{i}/{kind}" for kind in STATE}
            self.layouts[f"zero.tp{i}"] = FlatLayout("main", ("dp",), {"tp": i}, 2)
            entry = TensorEntry("float32", (numel,), f"zero.tp{i}", "optimizer")
            self.tensors |= dict.fromkeys(flats.values(), entry)
            self.groups[f"zero.tp{i}"] = FlatGroup(numel, members, flats)
        self._generator()
        return self

    def _members(self, i: int, ways: int) -> Iterator[Member]:
        """Yield what lies in the flat buffer of index `i` of tp: its piece of each parameter, norms in the first."""
        at = 0
        for p in self.model.parameters():
            if p.cut == "norm":
                if i == 0:
                    yield Member(f"model/{p.name}", at, p.shape)
                    at += prod(p.shape)
                continue
            dim = 0 if p.cut == "rows" else 1
            step = p.shape[dim] // ways
            shape = tuple(step if d == dim else n for d, n in enumerate(p.shape))
            offsets = tuple(i * step if d == dim else 0 for d in range(2))
            yield Member(f"model/{p.name}", at, shape, p.shape, offsets)
            at += prod(shape)

    def _generator(self) -> None:
        self.layouts["local"] = LocalLayout()
        self.tensors["rng/torch"] = TensorEntry("uint8", None, "local", "rng")


def dense(dp: int, tp: int) -> Job:
    """Return the dense model on dp x tp ranks, tp innermost."""
    return Job(DENSE, {"main": grid({"dp": dp, "tp": tp})})


def staged(pp: int, dp: int, tp: int) -> Job:
    """Return the dense model in `pp` pipeline stages."""
    return Job(DENSE, {"main": grid({"pp": pp, "dp": dp, "tp": tp})}).by_parameter(stages=pp)


def mixture(rep: int, dp: int, tp: int, edp: int, ep: int) -> Job:
    """Return the mixture of experts: replicas of FSDP and tensor parallelism, its experts on a mesh of their own."""
    meshes = {"main": grid({"rep": rep, "dp": dp, "tp": tp}), "experts": grid({"edp": edp, "ep": ep})}
    return Job(MIXTURE, meshes).by_parameter()
