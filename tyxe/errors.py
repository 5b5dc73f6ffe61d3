"""The one warning category of the package."""


class TyxeWarning(UserWarning):
    """A result would be quietly wrong, or not what the caller most likely meant.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", TyxeWarning)  # make them stop a run
        >>> warnings.simplefilter("default", TyxeWarning)
    """
