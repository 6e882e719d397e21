"""Ray Serve application: engines, the controller that keeps adapters on them, gateways in front.

Start it with `serve run serve_app:app`.
"""

from lorikeet.serving.deployments import controller, engine, gateway
from lorikeet.serving.start import guard_start
from lorikeet.settings import Settings

guard_start()
settings = Settings.from_env()
engines = {name: engine(settings, name) for name in settings.base_models}
app = gateway(settings, engines, controller(settings, engines))
