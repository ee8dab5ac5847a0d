from hypothesis import HealthCheck, settings

# A property says nothing about time, and a busy machine must not make it fail.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples on every machine: who only wants to know whether it works here should not be the one to find a bug.
settings.register_profile("default", **PATIENT, derandomize=True)
settings.register_profile("thorough", **PATIENT, max_examples=3000)
