"""A drafter's rotary positions: theta, and a stretch in one of the kinds that are served."""

from dflash_core.checkpoints.drafter_spec import RopeScaling
from dflash_core.checkpoints.fields import Fields, holder


def parse_rope(top: Fields) -> tuple[float, RopeScaling | None]:
    """Return theta and the stretch from ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling``.

    Raises:
        CheckpointError: no theta, two that differ, or a kind or a setting of rope that is not served.
    """
    rope = top.section("rope_parameters")
    section = holder("rope_theta", rope, top)
    theta = section.number("rope_theta", 1.0, 1e12)
    if "rope_theta" in top and top.number("rope_theta", 1.0, 1e12) != theta:
        raise top.error("rope_theta", f"{theta:g}, as in rope_parameters")
    scalings = [
        found for part in (rope, top.section("rope_scaling")) if (found := _scaling(part)) is not None
    ]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise top.error("rope_scaling", "the scaling of rope_parameters")
    return theta, scalings[0] if scalings else None


def _scaling(rope: Fields) -> RopeScaling | None:
    kind_key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    kind = rope.text(kind_key) or "default"
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if "partial_rotary_factor" in rope and rope.number("partial_rotary_factor", 0.0, 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "1.0: the whole head is turned")
    if kind not in ("default", "linear", "yarn"):
        raise rope.error(kind_key, "default, linear or yarn")
    if kind != "default":
        known |= {"factor"} | ({"original_max_position_embeddings"} if kind == "yarn" else set())
    for key in rope:
        if key not in known:
            raise rope.error(key, f"no such key for rope of kind {kind}")
    if kind == "default":
        return None
    factor = rope.number("factor", 1.0, 1e4)
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling("yarn", factor, rope.integer("original_max_position_embeddings", 1, 2**30))
