"""What a trainer's model has, for all rooms that need TorchRec. They import it first, so that packages that are missing or do not
fit each other are one line, and not what the loader says of a symbol."""

import logging

from neuroshard.core.extras import install_pair, install_torchrec
from neuroshard.core.versions import Installed


def check_imports() -> None:
    """Import TorchRec. Raises ModuleNotFoundError or ImportError in one line that says what is installed and what to install."""
    here = Installed.here()
    level = logging.root.manager.disable
    try:
        if here.unloadable:
            logging.disable()  # FBGEMM logs the library that fails, in several lines
        import torchrec  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the client for TorchRec needs the package {error.name}: {install_torchrec()}", name=error.name
        ) from None
    except (ImportError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why, install = here.unloadable or lines[0], install_pair(here) or install_torchrec()
        raise ImportError(f"TorchRec cannot be imported with {here}: {why}; {install}") from None
    finally:
        logging.disable(level)


check_imports()
