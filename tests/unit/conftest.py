from hypothesis import settings

# A property says nothing about time, and a busy machine must not make it fail.
settings.register_profile("default", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=3000)
