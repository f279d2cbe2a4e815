"""UNets that draw from noise alone, called as in diffusers."""

from typing import Any

from diffusax.models.calls.arguments import arrays, check_rows, result, take_map, take_numbers
from diffusax.models.network import Model
from diffusax.models.outputs import UNet2DOutput


class UNet2D(Model):
    """A UNet without a context, called as diffusers' UNet2DModel."""

    class_names = ("UNet2DModel",)

    def __call__(
        self, sample: Any, timestep: Any, class_labels: Any = None, return_dict: bool = True
    ) -> Any:
        """Predicts the noise (or v, or the sample): `.sample`, b c h w.

        Args:
            sample: the noisy images, b c h w.
            timestep: one number or b.
            class_labels: b (or b t, for the type "identity"), where the network has classes.
            return_dict: whether to return a UNet2DOutput instead of a tuple.

        Raises:
            ValueError: an array has another shape, or classes are missing or not for this network.
        """
        x, labels = take_map("sample", sample, self.config.in_channels), arrays(class_labels)
        check_rows("class_labels", labels, x.shape[0])
        times = take_numbers("timestep", timestep, x.shape[0])
        y = self.run(x, times, channels_first=True, class_labels=labels)
        return result(UNet2DOutput(y), return_dict, sample)
