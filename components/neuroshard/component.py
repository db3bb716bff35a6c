"""What the KFP components of all rooms share: they run in our image, and nothing is installed at run time.

KFP ships the source of a component's body alone, so a body imports what it calls. It turns text into values, calls its room, and
writes what comes back; whatever is decided is decided in the modules that it calls. The image holds this package, `sh`, `mktemp`,
`python3`, and kfp without its dependencies.
"""

from functools import partial

from kfp import dsl

from neuroshard import __version__

CPU_IMAGE = f"neuroshard-cpu:{__version__}"
GPU_IMAGE = f"neuroshard-gpu:{__version__}"

component = partial(dsl.component, base_image=CPU_IMAGE, packages_to_install=[], install_kfp_package=False)
