"""Ray Serve application: engines, the controller that keeps adapters on them, gateways in front.

Importing this module reads the settings from the environment. `lorikeet serve` runs the
application; `serve run lorikeet.serving.application:app` does without the command.
"""

from lorikeet.serving.deployments import controller, engine, gateway
from lorikeet.serving.start import guard_start
from lorikeet.settings import Settings

guard_start()
settings = Settings.from_env()
engines = {name: engine(settings, name) for name in settings.base_models}
app = gateway(settings, engines, controller(settings, engines))
