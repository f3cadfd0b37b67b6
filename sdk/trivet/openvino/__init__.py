"""OpenVINO: nodes of the IR as OpenVINO IR. Needs no OpenVINO at export time."""
