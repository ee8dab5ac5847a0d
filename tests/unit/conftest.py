from hypothesis import HealthCheck, settings

# Properties do not depend on time, and must not fail on a busy machine.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# Use the same examples on every machine, so that checking an installation does not find new bugs.
settings.register_profile("default", **PATIENT, derandomize=True)
settings.register_profile("thorough", **PATIENT, max_examples=3000)
