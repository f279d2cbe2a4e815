"""Reads the settings of an image from the graph that ComfyUI ran to make it."""

from collections.abc import Iterator, Mapping
from typing import Any

Graph = Mapping[str, Any]

_TEXTS = (
    "text",
    "text_g",
    "text_l",
    "t5xxl",
    "clip_l",
    "prompt",
    "string",
    "value",
    "populated_text",
)
"""Inputs that hold words, in the nodes that give them."""
_MOST, _DEEPEST, _MANY = 2000, 200, 20
"""The most nodes that are followed from one, in all and on the way to a prompt, and the most
samplers and ends that are looked at."""


def read(graph: Graph, size: tuple[int, int]) -> dict[str, Any] | None:
    """Returns the settings of the first sampler that made the image, under ComfyUI's names.

    Args:
        graph: the nodes by id, as ComfyUI's API takes them: `class_type` and `inputs`, in which
            another node's output is a list of its id and the output's number.
        size: the image's width and height, where the graph does not state it.
    """
    nodes = {str(i): node for i, node in graph.items() if _is_node(node)}
    ends = [i for i, node in nodes.items() if str(node["class_type"]).startswith("SaveImage")][
        :_MANY
    ]
    used = {i for end in ends for i in _before(nodes, end)} or set(nodes)
    samplers = [i for i in nodes if i in used and _is_sampler(nodes[i])][:_MANY]
    if not samplers:
        return None
    first = min(samplers, key=lambda i: sum(j in samplers for j in _before(nodes, i)))
    found = _settings(nodes, first, size)
    others = [str(nodes[i]["class_type"]) for i in samplers if i != first]
    nets = {str(nodes[i]["class_type"]) for i in used if "ControlNet" in nodes[i]["class_type"]}
    if others:
        found["Further samplers"] = " ".join(others)
    if nets:
        found["ControlNet"] = " ".join(sorted(nets))
    return found


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and "class_type" in node and isinstance(node.get("inputs"), dict)


def _is_sampler(node: Mapping[str, Any]) -> bool:
    inputs = node["inputs"]
    return ("positive" in inputs and ("seed" in inputs or "noise_seed" in inputs)) or (
        "guider" in inputs and "sigmas" in inputs
    )


def _links(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the inputs of a node that are other nodes' outputs, with their ids."""
    for name, value in node["inputs"].items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int):
            yield name, str(value[0])


def _before(nodes: Graph, begin: str, only: tuple[str, ...] = ()) -> list[str]:
    """Returns the nodes that one depends on, nearest first, with itself.

    only: the inputs to follow; all by default.
    """
    found, waiting = dict.fromkeys([begin]), [begin]
    while waiting and len(found) < _MOST:
        node = nodes.get(waiting.pop(0))
        for name, other in _links(node) if node else ():
            if other in nodes and other not in found and (not only or name in only):
                found[other] = None
                waiting.append(other)
    return list(found)


def _settings(nodes: Graph, sampler: str, size: tuple[int, int]) -> dict[str, Any]:
    inputs = nodes[sampler]["inputs"]
    found: dict[str, Any] = {}
    around = [sampler]
    for name in ("noise", "guider", "sampler", "sigmas"):
        # Samplers of custom graphs have each of their settings in a node of its own.
        around += [other for link, other in _links(nodes[sampler]) if link == name]
    for node in around:
        for name in ("seed", "noise_seed", "steps", "cfg", "sampler_name", "scheduler", "denoise"):
            value = _value(nodes, nodes.get(node, {"inputs": {}})["inputs"].get(name))
            if value is not None:
                found.setdefault("seed" if name == "noise_seed" else name, value)
    if found.get("denoise") in (1, 1.0):
        del found["denoise"]
    for name in ("start_at_step", "end_at_step"):
        if inputs.get(name) not in (None, 0, 10000):
            found[name] = inputs[name]
    found["prompt"] = _words(nodes, around, ("positive", "conditioning"), 0)
    found["negative_prompt"] = _words(nodes, around, ("negative",), 1)
    guidance = [nodes[i]["inputs"].get("guidance") for i in _before(nodes, sampler)]
    guidance = [one for one in guidance if isinstance(one, int | float)]
    if guidance:
        # FLUX's own guidance, which is none of two branches.
        found["cfg"] = guidance[0]
    models = _before(nodes, sampler, ("model", "guider", "lora_stack"))
    found["loras"] = [
        (node["lora_name"], node.get("strength_model", 1))
        for node in (nodes[i]["inputs"] for i in reversed(models))
        if isinstance(node.get("lora_name"), str)
    ]
    for name in ("ckpt_name", "unet_name"):
        files = [nodes[i]["inputs"].get(name) for i in models]
        found.setdefault("ckpt_name", next((f for f in files if isinstance(f, str)), None))
        if found["ckpt_name"] is None:
            del found["ckpt_name"]
    found["width"], found["height"] = _size(nodes, sampler, size)
    return found


def _value(nodes: Graph, value: Any, depth: int = 8) -> Any:
    """Returns a number or a word, also where another node gives it."""
    if isinstance(value, str | int | float):
        return value
    if not depth or not isinstance(value, list) or not value or str(value[0]) not in nodes:
        return None
    inputs = nodes[str(value[0])]["inputs"]
    names = ("value", "seed", "int", "float", "number", "Value", "noise_seed")
    given = next((inputs[name] for name in names if name in inputs), None)
    return _value(nodes, given, depth - 1)


def _words(nodes: Graph, around: list[str], names: tuple[str, ...], slot: int) -> str:
    """Returns the prompt that reaches a sampler through one of its inputs."""
    for node in around:
        for name, other in _links(nodes[node]):
            if name in names:
                return _text(nodes, other, slot, set()) or ""
    return ""


def _text(nodes: Graph, node: str, slot: int, seen: set[str]) -> str | None:
    """Returns the words of a node, or of those that it takes them from."""
    if node in seen or node not in nodes or len(seen) > _DEEPEST:
        return None
    seen.add(node)
    inputs, links = nodes[node]["inputs"], dict(_links(nodes[node]))
    found = []
    for name in _TEXTS:
        if isinstance(inputs.get(name), str):
            found.append(inputs[name])
        elif name in links:
            found.append(_text(nodes, links[name], slot, seen))
    words = list(dict.fromkeys(text for text in found if text))
    if words:
        return "\n".join(words)
    # A node that takes both prompts gives them on, each on its own output.
    own = ("positive", "negative")[slot]
    if isinstance(inputs.get(own), str):
        return inputs[own]
    ways = [own] if own in links else [name for name in links if name.startswith("conditioning")]
    texts = [_text(nodes, links[name], slot, seen) for name in ways]
    return "\n".join(text for text in texts if text) or None


def _size(nodes: Graph, sampler: str, size: tuple[int, int]) -> tuple[int, int]:
    """Returns width and height of the latents that a sampler begins with."""
    for node in _before(nodes, sampler, ("latent_image", "samples", "latent")):
        inputs = nodes[node]["inputs"]
        sides = [_value(nodes, inputs.get(name)) for name in ("width", "height")]
        if all(isinstance(side, int) and side > 0 for side in sides):
            return sides[0], sides[1]
    return size
