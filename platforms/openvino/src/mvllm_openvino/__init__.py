"""The OpenVINO platform: step graphs of any model as OpenVINO models on the host's processor."""
