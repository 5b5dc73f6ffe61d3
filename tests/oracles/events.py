"""The linear maps that a net went through."""

from pyro.poutine.messenger import Messenger


class Events(Messenger):
    """Keep every linear map with its output."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _pyro_post_linear_map(self, msg):
        self.events.append((msg["args"][0], msg["value"]))
