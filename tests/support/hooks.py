"""What the page docs/reference/hooks.md defines, for tests of it."""

import re

from support.repository import ROOT

PAGE = ROOT / "docs/reference/hooks.md"


def defined(*names):
    """The objects of these names, from the page's blocks that define something at their top."""
    found = {"__name__": "hooks_page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    for code in blocks:
        if re.search(r"^(def|class) ", code, re.M) and "from_pretrained" not in code:
            # The first function is followed by a call of the pipeline, which is the page's own.
            exec(compile(code.split("\n\n\nimage = ")[0], str(PAGE), "exec"), found)
        elif code.startswith("from diffusax import StableDiffusionPipeline"):
            exec(code.splitlines()[0], found)
    return [found[name] for name in names]
