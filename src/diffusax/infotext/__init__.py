"""The settings of images as text in their files: written and read as stable-diffusion-webui does.

`text` writes and reads them, `samplers` knows webui's names, `files` finds the texts in an image's
file, and `others` turns what other programs write into webui's form.
"""
