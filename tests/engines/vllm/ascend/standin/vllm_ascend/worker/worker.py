from vllm.v1.worker.cpu_worker import CPUWorker


class NPUWorker(CPUWorker):
    def load_model(self):
        super().load_model()

    def execute_model(self, scheduler_output):
        return super().execute_model(scheduler_output)

    def initialize_from_config(self, kv_cache_config):
        super().initialize_from_config(kv_cache_config)
