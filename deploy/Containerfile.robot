# The robot's half on a Jetson Orin with JetPack 6: Ubuntu 22.04, ROS 2 Humble, Python 3.10. On the Jetson (arm64), from
# the repository's root:
#
#   docker build -f deploy/Containerfile.robot --build-arg TORCH='https://.../torch-....whl#sha256=...' -t dsd-robot .
#   docker run --runtime nvidia --network host --restart unless-stopped -v /etc/dsd:/etc/dsd:ro \
#       dsd-robot verifier:=wss://cloud.example:8765 token_file:=/etc/dsd/token
#
# TORCH: the address of NVIDIA's wheel for JetPack 6 and Python 3.10 with its hash (docs/install.md); "cpu" does without
# the GPU. `docker inspect --format '{{index .RepoDigests 0}}' BASE` prints the base's digest: build with BASE=that, so
# that a tag which names another image tomorrow changes nothing.
ARG BASE=nvcr.io/nvidia/l4t-jetpack:r36.4.0
FROM $BASE
ARG TORCH=cpu
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl \
 && curl -fsSL https://raw.githubusercontent.com/ros/rosdistro/master/ros.key -o /usr/share/keyrings/ros.gpg \
 && echo "deb [signed-by=/usr/share/keyrings/ros.gpg] http://packages.ros.org/ros2/ubuntu jammy main" \
      > /etc/apt/sources.list.d/ros2.list \
 && apt-get update && apt-get install -y --no-install-recommends ros-humble-ros-base ros-humble-cv-bridge \
      ros-humble-diagnostic-msgs ros-humble-visualization-msgs \
      build-essential cmake python3-colcon-common-extensions python3-opencv python3-pil python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/dsd
RUN python3 -m venv --system-site-packages .venv && touch .venv/COLCON_IGNORE
ENV PATH=/opt/dsd/.venv/bin:$PATH
COPY requirements src/dsd_ros/requirements
RUN cd src/dsd_ros/requirements && pip install --require-hashes -r pip.txt \
 && pip install --require-hashes --only-binary :all: -r beside-ros.txt -r jetpack6.txt
RUN cd src/dsd_ros/requirements && case "$TORCH" in \
      cpu) pip install --require-hashes --only-binary :all: -r torch.txt ;; \
      https://*.whl#sha256=*) pip install --require-hashes --only-binary :all: -c lock.txt jinja2 networkx sympy \
        && pip install --no-deps "$TORCH" ;; \
      *) echo "TORCH is '$TORCH'; it must be cpu or https://....whl#sha256=..." >&2; exit 2 ;; \
    esac
COPY setup.py setup.cfg pyproject.toml package.xml colcon.pkg src/dsd_ros/
COPY resource src/dsd_ros/resource
COPY launch src/dsd_ros/launch
COPY config src/dsd_ros/config
COPY models src/dsd_ros/models
COPY src/dsd_msgs src/dsd_ros/src/dsd_msgs
COPY src/dsd_ros src/dsd_ros/src/dsd_ros
RUN . /opt/ros/humble/setup.sh && colcon build && useradd --system --uid 10001 --create-home dsd
# A numeric id lets an orchestrator check that this is not root.
USER 10001:10001
ENV HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# `ros2 launch` passes SIGINT on, and the driver ends with an acknowledged stop.
STOPSIGNAL SIGINT
ENTRYPOINT ["/bin/bash", "-c", ". /opt/ros/humble/setup.bash && . install/setup.bash && exec ros2 launch dsd_ros robot.launch.py \"$@\"", "robot"]
